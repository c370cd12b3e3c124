"""Messages of a command, and its progress as one line that is drawn over itself where that is seen."""

import json
import shutil
import sys

#: Seconds between two states of a line that is drawn over itself, and between two lines of a log.
_LIVE_S = 0.2
_LOG_S = 30

#: Flags of messages of the program, of which `--quiet` excludes the others and itself.
_CHOICES = {"-q", "--quiet", "-v", "--verbose"}

#: Characters of the bar, and of a line in a notebook, whose width is not known.
_BAR_WIDTH = 20
_NOTEBOOK_WIDTH = 120


class Messages:
    """Shows the messages of one command on `sys.stderr`, each once.

    Without progress, only warnings are shown, unless the command is told to be verbose. It is a context manager, whose
    end removes an incomplete line of progress.
    """

    def __init__(self, show_progress):
        self.show_progress = show_progress
        self.is_notebook = "ipykernel" in sys.modules
        self.is_live = self.is_notebook or _is_terminal(sys.stderr)
        self.shown = set()
        #: Length of the line of progress that is on the screen.
        self.width = 0

    def flags(self, words):
        """Returns the flags with which the program, called with `words`, writes the messages that `show` reads."""
        flags = ["--log-format", "json", "--log-every", _LIVE_S if self.is_live else _LOG_S]
        if not self.show_progress and _CHOICES.isdisjoint(words):
            flags.append("--quiet")
        return flags

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._clear()

    def show(self, line):
        """Shows a line of the program."""
        said = _parse(line)
        text = said["message"]
        if said["level"] != "info":
            text = f"{said['level']}: {text}"
        if not self.show_progress and ("step" in said or "stage" in said):
            return
        if "step" in said:
            self._show_progress(said["step"], said["total_steps"], text)
            if self.width and said["step"] == said["total_steps"]:
                self._keep()
        elif "stage" in said:
            self._show_progress(said["done"], said["total"], text)
        elif text not in self.shown:
            self.shown.add(text)
            self._clear()
            print(text, file=sys.stderr, flush=True)

    def _show_progress(self, done, total, text):
        if not self.is_live:
            print(text, file=sys.stderr, flush=True)
            return
        width = _NOTEBOOK_WIDTH if self.is_notebook else shutil.get_terminal_size().columns - 1
        line = f"{_bar(done, total)} {text}"[:width]
        sys.stderr.write("\r" + line.ljust(self.width))
        sys.stderr.flush()
        self.width = len(line)

    def _keep(self):
        """Ends the line of progress, so that it stays."""
        print(file=sys.stderr, flush=True)
        self.width = 0

    def _clear(self):
        """Removes the line of progress, so that a message does not continue it."""
        if self.width:
            sys.stderr.write("\r" + " " * self.width + "\r")
            self.width = 0


def _parse(line):
    try:
        said = json.loads(line)
    except ValueError:
        said = None
    if isinstance(said, dict) and "level" in said and "message" in said:
        return said
    return {"level": "info", "message": line.rstrip()}


def _bar(done, total):
    n_done = round(_BAR_WIDTH * done / total) if total else 0
    return f"[{'=' * n_done}{' ' * (_BAR_WIDTH - n_done)}]"


def _is_terminal(stream):
    return hasattr(stream, "isatty") and stream.isatty()
