"""Image sets as `save_to_disk` of Hugging Face's `datasets` leaves them, written with pyarrow alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROWS = 3  # of a batch


def save_set(
    folder: Path,
    images: Sequence[dict[str, Any] | None],
    labels: Sequence[Any],
    names: Sequence[str] | None = None,
    files: int = 1,
) -> Path:
    """images: of each its bytes, or its path. names: of the classes, if labels are their numbers."""
    import pyarrow as pa

    label = {"names": list(names), "_type": "ClassLabel"} if names else {"dtype": "string", "_type": "Value"}
    about = {"info": {"features": {"image": {"_type": "Image"}, "label": label}}}
    kinds = {"image": pa.struct({"bytes": pa.binary(), "path": pa.string()})}
    kinds["label"] = pa.int64() if names else pa.string()
    schema = pa.schema(kinds, metadata={"huggingface": json.dumps(about)})
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pydict({"image": list(images), "label": list(labels)}, schema)
    called, each = [], -(-len(images) // files)
    for i in range(files):
        called.append(f"data-{i:05}-of-{files:05}.arrow")
        with pa.ipc.new_stream(str(folder / called[-1]), schema) as stream:
            stream.write_table(table.slice(i * each, each), ROWS)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in called]}))
    (folder / "dataset_info.json").write_text(json.dumps(about["info"]))
    return folder
