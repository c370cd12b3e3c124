"""Values of Python as TOML, in which recipes are written."""

import json
import math
import os
import re

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")


def set_flags(settings):
    """Returns the flags `--set` for a dictionary of keys such as `optim.lr`, or of sections such as `optim`."""
    flags = []
    for key, value in (settings or {}).items():
        if isinstance(value, dict) and "." not in key:
            for name, inner in value.items():
                flags += ["--set", f"{key}.{name}={_setting(f'{key}.{name}', inner)}"]
        else:
            flags += ["--set", f"{key}={_setting(key, value)}"]
    return flags


def _setting(key, value):
    """Returns a value as `--set` takes it: a text is TOML, or else a string."""
    return value if isinstance(value, str) else to_toml(key, value)


def to_toml(key, value):
    """Returns `value` in one line of TOML; `key` names it in errors."""
    # Numbers and arrays of NumPy and PyTorch.
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, (str, os.PathLike)):
        return json.dumps(os.fspath(value), ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(to_toml(key, item) for item in value) + "]"
    if isinstance(value, dict):
        pairs = (f"{_key(name)} = {to_toml(f'{key}.{name}', item)}" for name, item in value.items())
        return "{ " + ", ".join(pairs) + " }"
    raise TypeError(
        f"settings: {key} is {value!r}, which a recipe cannot hold: leave it out, or give a number, a text, a list or "
        "a dictionary"
    )


def _key(name):
    name = str(name)
    return name if _BARE_KEY.match(name) else json.dumps(name, ensure_ascii=False)


def _float(value):
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return repr(value)
