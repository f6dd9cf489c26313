"""The story of docs/tutorials/your-images.md is played, and the tool that plays it notices what is not true."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the service's packages are not installed")
import story

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "your-images.md"

SMALL = """# A page

```console
$ echo one 0.912
one 0.911
$ printf 'a  \\n\\n  training, epoch 3 of 9: loss 1.0, 2 s left\\nb\\n'
```

```sh
$ rm -rf never
```
"""


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("bash") and shutil.which("curl")), reason="bash and curl play the story")
def test_the_page_is_true(tmp_path):
    story.write_photos(tmp_path)
    wrong = {}
    for step, printed in story.play(PAGE.read_text(encoding="utf-8"), tmp_path):
        found = story.differences(step.output, printed)
        if found:
            wrong[step.command] = found
    assert not wrong


def test_steps_are_the_commands_of_console_blocks():
    first, second = story.steps(SMALL)
    assert first.command == "echo one 0.912" and first.output == "one 0.911\n"
    assert second.command.startswith("printf") and second.output == ""


def test_writing_puts_the_output_below_each_command(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(SMALL)
    assert story.main([str(page)]) == 1
    assert story.main([str(page), "--write"]) == 0
    assert story.main([str(page)]) == 0
    assert "$ echo one 0.912\none 0.912\n$ printf" in page.read_text() and "\na\nb\n```" in page.read_text()
    assert "rm -rf never" in page.read_text()


@pytest.mark.parametrize(
    ("page", "printed", "same"),
    [
        ("one 0.911  (four 0.837)", "one 0.912  (four 0.836)", True),
        ("one 0.911", "one 0.95", False),
        ("one 0.911", "two 0.911", False),
        ("Learned  2026-11-16", "Learned  2027-01-02", True),
        ("58,732 bytes", "58,731 bytes", True),
        ("58,732 bytes", "5,873 bytes", False),
        ("3 of 9 right", "4 of 9 right", False),
        ("a", "a\nb", False),
        ("two eight 0.892  ━━━╸\none eight 0.890  ━━━", "one eight 0.891  ━━━\ntwo eight 0.890  ━━━", True),
        ("5", "6", True),
        ("5", "9", False),
    ],
)
def test_only_rounding_and_dates_may_differ(page, printed, same):
    assert (not story.differences(page, printed)) is same
