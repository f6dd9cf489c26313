import sys

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

import siege


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_a_short_siege_is_held(capsys):
    siege.main(["--seconds", "2", "--clients", "1"])
    told = capsys.readouterr().out
    assert "wrong: 0" in told and "ordinary: median" in told
