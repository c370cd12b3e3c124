"""Makes tests/golden/shards/: small shards by the tools that people have shards from.

Needs webdataset 0.2 (which still has `wids`), img2dataset and pillow. Run at the root of the repository:

    python scripts/golden/shards.py

`webdataset-000000.tar` is by webdataset's ShardWriter, `00000.tar` by img2dataset from a web server that this
script starts, `wids.json` by wids.
"""

import functools
import http.server
import io
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import webdataset as wds
from PIL import Image

OUT = Path("tests/golden/shards")


def picture(number: int) -> Image.Image:
    return Image.new("RGB", (24, 16), (40 * number, 200 - 40 * number, 90))


def encoded(number: int, form: str) -> bytes:
    out = io.BytesIO()
    picture(number).save(out, form)
    return out.getvalue()


def webdataset() -> None:
    with wds.ShardWriter(str(OUT / "webdataset-%06d.tar"), verbose=0) as sink:
        for i in range(3):
            name = f"train/n0{i}/img_{i}"
            sink.write({"__key__": name, "jpg": encoded(i, "JPEG"), "cls": i, "json": {"n": i}, "seg.png": encoded(i, "PNG")})


def img2dataset() -> None:
    from img2dataset import download

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for i in range(3):
            (root / f"{i}.jpg").write_bytes(encoded(i, "JPEG"))
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        # The last one is not there: img2dataset leaves it out of the tar.
        rows = [f"http://127.0.0.1:{port}/{i}.jpg,caption {i}" for i in range(4)]
        (root / "list.csv").write_text("url,caption\n" + "\n".join(rows) + "\n")
        download(
            url_list=str(root / "list.csv"), input_format="csv", url_col="url", caption_col="caption",
            output_folder=str(root / "out"), output_format="webdataset", processes_count=1, thread_count=1,
            image_size=16, resize_mode="keep_ratio", enable_wandb=False,
        )
        server.shutdown()
        shutil.copy(root / "out" / "00000.tar", OUT / "00000.tar")


def wids() -> None:
    names = ["webdataset-000000.tar", "00000.tar"]
    command = [sys.executable, "-m", "wids.wids_index", "create", "--output", "wids.json", "--name", "golden", *names]
    subprocess.run(command, cwd=OUT, check=True)
    print(json.dumps(json.loads((OUT / "wids.json").read_text()), indent=1))


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    webdataset()
    img2dataset()
    wids()
