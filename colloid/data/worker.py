"""The process of a data worker: `python -m colloid.data.worker`.

Frames on stdin: first the pickled processor, then lists of rows; on stdout one answer each (see `workers`). Both ends
are colloid's own. The process ends with its parent, also in the middle of a chunk: a thread waits for stdin's end.
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import threading

from colloid.data.workers import read_frame, write_frame


def main() -> None:
    """Answers until stdin ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What a library prints goes to the log.
    frames: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_receive, args=(frames,), daemon=True).start()
    process = pickle.loads(frames.get())
    while True:
        try:
            answer = process(pickle.loads(frames.get()))
        except Exception as error:  # A tokenizer's code may raise whatever it likes; the parent tells.
            answer = RuntimeError(f"a data worker: {type(error).__name__}: {error}")
        write_frame(answers, pickle.dumps(answer))


def _receive(frames: queue.Queue[bytes]) -> None:
    try:
        while True:
            frames.put(read_frame(sys.stdin.buffer))
    except EOFError:
        os._exit(0)


if __name__ == "__main__":
    main()
