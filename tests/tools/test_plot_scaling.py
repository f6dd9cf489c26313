from __future__ import annotations

import plot_scaling
from protosteer.bench.scaling import Point


def test_the_picture_shows_what_was_measured(tmp_path, monkeypatch, capsys):
    points = [
        Point(100, 10, 3.0, [0.06, 0.07], [0.001, 0.002], 0.01),
        Point(1000, 100, 3.0, [0.06], [0.004], 0.1),
    ]
    lines = plot_scaling.draw(points).axes[0].get_lines()
    assert list(lines[0].get_ydata()) == [65.0, 60.0] and list(lines[1].get_ydata()) == [1.5, 4.0]
    assert list(lines[2].get_ydata()) == [3.25, 3.0] and list(lines[1].get_xdata()) == [100, 1000]
    monkeypatch.setattr(plot_scaling, "curve", lambda repeats: points[:repeats])
    plot_scaling.main(["--out", str(tmp_path / "x.png"), "--repeats", "2"])
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    assert "1,000 classes, 100 tasks: 4.00 ms an image, 6.7 %" in capsys.readouterr().out
