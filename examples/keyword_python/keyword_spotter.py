"""Hears a word of your own choice: say it once or more, then let the program listen.

    keyword_spotter.py WORD.wav [AGAIN.wav ...] --listen SOUND.wav
    arecord -q -t raw -f S16_LE -r 16000 | keyword_spotter.py WORD.wav --listen -

Two networks turn sound into 96 numbers for each 80 ms: a spectrogram, and Google's speech
embedding. Where some of them in a row are as in a recording of the word, it was said. Nothing is
trained. Needs the two bundles' `python/` folders in PYTHONPATH, and NumPy.
"""

from __future__ import annotations

import argparse
import sys
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from embedding_model import Model as Embedding
from melspectrogram import Model as Spectrogram

RATE_HZ = 16000
STEP = 1280  # samples, 80 ms: 8 frames of the spectrogram
WINDOW = 1760  # what 8 frames are computed from: STEP and a little before it
FRAMES = 76  # of the spectrogram in one embedding, 760 ms
WORD = 10  # embeddings in a row that are compared
THRESHOLD = 0.65


class Ears:
    """Takes sound step by step and turns it into embeddings."""

    def __init__(self) -> None:
        self._spectrogram, self._embedding = Spectrogram(), Embedding()
        self._sound = self._spectrogram.empty_input()
        self._frames = self._embedding.empty_input()
        self._sound[:], self._frames[:] = 0, 0
        (self._features,) = (tensor.name for tensor in self._embedding.outputs)
        (self._mel,) = (tensor.name for tensor in self._spectrogram.outputs)

    def hear(self, step: np.ndarray) -> np.ndarray:
        """Returns the 96 numbers of the last 760 ms; `step` holds the next 1280 samples, int16."""
        self._sound[0, :-STEP] = self._sound[0, STEP:]
        self._sound[0, -STEP:] = step
        mel = self._spectrogram(self._sound)[self._mel][0, 0]
        self._frames[0, : -len(mel)] = self._frames[0, len(mel) :]
        self._frames[0, -len(mel) :, :, 0] = mel / 10 + 2  # the range that the embedding knows
        return self._embedding(self._frames)[self._features].ravel()


class Word:
    """A word as it was recorded once or more."""

    def __init__(self, recordings: list[np.ndarray]) -> None:
        if not all(sound.any() for sound in recordings):
            raise ValueError("a recording of the word is empty or silent")
        heard = [_loudest(_embeddings(_padded(sound)), sound) for sound in recordings]
        # What all sounds have in common says nothing about the word.
        everything = np.concatenate([everything for everything, _ in heard])
        self._mean, self._scale = everything.mean(0), everything.std(0) + 1e-6
        self._words = [self._direction(word) for _, word in heard]

    def similarity(self, embeddings: np.ndarray) -> float:
        """Returns how much WORD embeddings in a row sound like it, 1 at most."""
        direction = self._direction(embeddings)
        return float(max((word * direction).sum(1).mean() for word in self._words))

    def _direction(self, embeddings: np.ndarray) -> np.ndarray:
        centered = (embeddings - self._mean) / self._scale
        return centered / np.linalg.norm(centered, axis=1, keepdims=True)


def listen(
    word: Word, steps: Iterator[np.ndarray], threshold: float
) -> Iterator[tuple[float, float]]:
    """Yields time in seconds and similarity whenever the word was said: at its most similar."""
    ears, recent = Ears(), []
    best = (0.0, 0.0)
    for index, step in enumerate(steps):
        recent = [*recent[1 - WORD :], ears.hear(step)]
        if (index + 1) * STEP < RATE_HZ or len(recent) < WORD:
            continue  # the memory of the first second holds silence that nobody heard
        now = ((index + 1) * STEP / RATE_HZ, word.similarity(np.stack(recent)))
        if now[1] > max(best[1], threshold):
            best = now
        elif best[1] > 0 and now[1] < threshold:
            yield best
            best = (0.0, 0.0)
    if best[1] > 0:
        yield best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("word", nargs="+", type=Path, help="the word alone: 16 kHz, mono, 16 bits")
    parser.add_argument("--listen", required=True, help="a WAV file, or - for raw sound on stdin")
    parser.add_argument("--threshold", type=float, default=THRESHOLD, help="between 0 and 1")
    given = parser.parse_args()
    try:
        word = Word([read_wav(path) for path in given.word])
        sound = from_stdin() if given.listen == "-" else from_file(Path(given.listen))
        for time_s, similarity in listen(word, sound, given.threshold):
            print(f"{time_s:.2f} s  {similarity:.2f}", flush=True)
    except (OSError, ValueError, wave.Error) as error:
        print(f"keyword_spotter: {error}", file=sys.stderr)
        return 1
    return 0


def read_wav(path: Path) -> np.ndarray:
    """Returns the samples, int16. Raises ValueError for another format than this program's."""
    with wave.open(str(path)) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (RATE_HZ, 1, 2):
            raise ValueError(f"{path} is not 16 kHz, mono, 16 bits: convert it with sox or ffmpeg")
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def from_file(path: Path) -> Iterator[np.ndarray]:
    """Yields the steps of a file."""
    sound = read_wav(path)
    for start in range(0, len(sound) - STEP + 1, STEP):
        yield sound[start : start + STEP]


def from_stdin() -> Iterator[np.ndarray]:
    """Yields steps as they come in, until the input ends."""
    while len(raw := sys.stdin.buffer.read(2 * STEP)) == 2 * STEP:
        yield np.frombuffer(raw, "<i2")


def _padded(sound: np.ndarray) -> np.ndarray:
    """The recording with a second of near silence on both sides; digital zeros sound like nothing
    that a microphone hears."""
    noise = np.random.default_rng(0).normal(0, 20, len(sound) + 2 * RATE_HZ)
    noise[RATE_HZ:-RATE_HZ] += sound
    return np.clip(noise, -32768, 32767).astype(np.int16)


def _embeddings(sound: np.ndarray) -> np.ndarray:
    ears = Ears()
    starts = range(0, len(sound) - STEP + 1, STEP)
    return np.stack([ears.hear(sound[start : start + STEP]) for start in starts])


def _loudest(embeddings: np.ndarray, sound: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the embeddings after the first second, and those WORD around the word itself."""
    energy = np.abs(sound.astype(np.float64))
    middle_s = 1 + float((energy * np.arange(len(sound))).sum() / energy.sum()) / RATE_HZ
    # An embedding has its own middle half a window before its end.
    middle = round((middle_s + FRAMES / 200) * RATE_HZ / STEP)
    start = min(max(middle - WORD // 2, 0), len(embeddings) - WORD)
    return embeddings[RATE_HZ // STEP :], embeddings[start : start + WORD]


if __name__ == "__main__":
    sys.exit(main())
