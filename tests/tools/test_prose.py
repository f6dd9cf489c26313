"""The check of wording finds a private word in a page, a docstring, a comment and a message, and nothing in code."""

import prose


def test_private_words_are_found_where_people_read_them(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "src").mkdir()
    page = "Whoever reads `whoever` ...\n\n```sh\nwhoever\n```\nThe likeliest class. <!-- prose: off -->\n"
    (tmp_path / "docs" / "page.md").write_text(page, encoding="utf-8")
    code = '"""Nobody knows."""\nnobody = "bookmark"  # is written whole\nraise ValueError(f"{nobody} in doubt")\n'
    (tmp_path / "src" / "module.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    found = [line.partition(": write")[0] for line in (*prose.pages(), *prose.sources())]
    assert found == [
        "docs/page.md:1: 'Whoever'",
        "src/module.py:1: 'Nobody'",
        "src/module.py:3: 'in doubt'",
        "src/module.py:2: 'is written whole'",
    ]
