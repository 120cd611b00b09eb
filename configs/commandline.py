"""From the command line to a config, and from an error to one sentence."""

import contextlib
import functools
import os
import re
import sys
from difflib import get_close_matches
from pathlib import Path

from absl import app, flags
from ml_collections.config_flags import register_flag_parser_for_type

from headcount.configs.base import get_config

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run (or sweep).")
DIRECTORY = flags.DEFINE_string(
    "directory", None, "Folder of local data files; default: the run's data.directory."
)
TASK_FILE = flags.DEFINE_string(
    "task_file", None, "Python file that adds a task of your own to headcount.tasks."
)

WANTED = {  # what the parsers of flags say, and what they mean
    "invalid literal for int()": "a whole number",
    "could not convert string to float": "a number",
    "('Non-boolean argument": "true or false",
}
MEMORY = {  # what needs less of it, by script
    "train.py": "Fewer trials (seeds, or --group_size of a sweep), a lower "
    "data.batch_tokens, a higher train.accumulate_steps or train.remat=block needs",
    "eval.py": "A lower --beam_size or --batch_size needs",
}
EXHAUSTED = re.compile(r"RESOURCE_EXHAUSTED.*(out of memory|allocat)", re.I | re.DOTALL)


@contextlib.contextmanager
def one_sentence(kinds=(ValueError, OSError, NotImplementedError)):
    """Turn an error that the user can mend into one line and exit code 2.

    Around what meets the outside: flags, config values, files. Inside, an error is
    ours, and its traceback is wanted; but for one that says that memory is exhausted,
    on the host or on a device.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # to `run`
    except kinds as error:
        fail(describe(error))
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not EXHAUSTED.search(str(error)):
            raise
        why = str(error).removeprefix("RESOURCE_EXHAUSTED: ").split("\n")[0].rstrip(".")
        less = MEMORY.get(script(), "A smaller model needs")
        fail(f"The memory is exhausted ({why or 'of the host'}). {less} less.")


def script() -> str:
    """The name of what runs."""
    return sys.argv[0].rsplit("/", 1)[-1]


def fail(sentence: str) -> None:
    """Print one line on standard error and exit with code 2."""
    print(f"{script()}: {sentence}", file=sys.stderr, flush=True)
    sys.exit(2)


def describe(error: BaseException) -> str:
    """What an error says, in one line."""
    if isinstance(error, FileExistsError | NotADirectoryError):
        return f"{error.filename}: a file is where a folder must be; choose another."
    if isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if error.filename else ""
        return f"{name}{error.strerror}."
    return " ".join(str(error).split())


def run(main) -> None:
    """Parse the flags, then call `main()`; a bad flag ends in one sentence."""
    replace_closed()
    app.define_help_flags()
    take_none()
    try:
        rest = flags.FLAGS(sys.argv)[1:]
        if "config" in flags.FLAGS and flags.FLAGS.config is not None:
            flags.FLAGS.config.keys()  # one that can't be read says so only now
            check_keys(flags.FLAGS.config)
            check_none(flags.FLAGS.config, flags.FLAGS["config"].override_values)
    except (flags.Error, KeyError, AttributeError, OSError, ValueError) as error:
        fail(flag_error(error, sys.argv[1:]))
    except SyntaxError as error:
        fail(f"{error.filename}, line {error.lineno}, is not Python: {error.msg}.")
    if rest:
        fail(f"Don't know what to do with {rest[0]!r}; write flags as --name=value.")
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has enough; nor may Python's own flush complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:  # where nobody is to save anything
        print(f"{script()}: stopped by Ctrl-C.", file=sys.stderr, flush=True)
        sys.exit(130)


def replace_closed() -> None:
    """Let a standard stream that was closed before the start, as by `<&-`, be empty.

    Else Python has None there, and the next file that is opened gets its number, into
    which libraries write their warnings.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def take_none() -> None:
    """Let flags of a config's keys take None, which only some keys may be."""
    parsers = {
        int: flags.IntegerParser,
        float: flags.FloatParser,
        bool: flags.BooleanParser,
        str: flags.ArgumentParser,
    }
    for kind, parser in parsers.items():

        class OrNone(parser):
            """The parser of a type, but for None."""

            def parse(self, argument):
                return None if argument == "None" else super().parse(argument)

        register_flag_parser_for_type(kind, OrNone())


def path_of(flag) -> Path:
    """The file or folder that a flag names; ~ is the user's own."""
    if not flag.value:  # as of a variable of the shell that is not set
        fail(f"--{flag.name} is empty; name a file or folder.")
    return Path(os.path.expanduser(flag.value))


def check_keys(config) -> None:
    """Raise a ValueError where a config file adds a key, which nothing would read."""
    given, known = flat(config.to_dict()), flat(get_config().to_dict())
    for key in given.keys() - known.keys():
        raise ValueError(
            f"The config file sets {key}, which is no config key.{near_miss(key)}"
        )
    for key in known.keys() - given.keys():
        raise ValueError(
            f"The config file lacks {key}; begin with get_config() of configs/base.py."
        )


def check_none(config, given: dict) -> None:
    """Raise a ValueError where a key was given None and has a default."""
    for path, value in given.items():
        *sections, key = path.split(".")
        section = functools.reduce(getattr, sections, config)
        # a placeholder keeps the type of what it may be
        if value is None and section.get_type(key) is type(None):
            raise ValueError(f"config.{path} must have a value, got None.")


def flag_error(error: Exception, argv: list[str]) -> str:
    """Name the flag that absl or ml_collections refused, and what may be meant."""
    text = str(error)
    if isinstance(error, KeyError | AttributeError):  # a locked config's unknown key
        if "no attribute 'get_config'" in text:
            return "The config file has no function get_config(); see configs/base.py."
        key = re.findall(r"\w+", text.replace("\\n", " "))[0]
        names = [arg.split("=")[0].lstrip("-") for arg in argv]
        name = next((name for name in names if f".{key}" in name), None)
        if name is None:
            return f"The config file uses {key}, no config key.{near_miss(key)}"
        return f"There is no config key {name}.{near_miss(name.split('.', 1)[-1])}"
    if isinstance(error, OSError):
        path = [b for a, b in zip(argv, argv[1:], strict=False) if a == "--config"]
        path += [a.split("=", 1)[1] for a in argv if a.startswith("--config=")]
        return f"There is no config file {path[-1]}; configs/ holds those there are."
    for words, kind in WANTED.items():
        flag, found, _ = text.partition(f": {words}")
        if found and "\n" not in flag:
            name, value = flag.removeprefix("flag ").split("=", 1)
            return f"{name} must be {kind}, got {value!r}."
    last = text.splitlines()[-1]  # before it stands a traceback of the config file
    head = text.splitlines()[0].split(": Error whilst")[0]
    if "get_config() takes 0 positional arguments" in last:
        return f"{head}: this config has no variants; leave out the colon and the rest."
    return last if last.startswith(head) else f"{head}: {last.split(': ', 1)[-1]}"


def near_miss(path: str) -> str:
    """Config keys that look like the unknown one, or end like it."""
    keys = list(flat(get_config().to_dict()))
    last = path.rsplit(".", 1)[-1]
    names = [key for key in keys if key.endswith(f".{last}")]
    names = names or get_close_matches(path, keys, n=1)
    if not names:
        return " configs/base.py lists them all."
    return f" Did you mean {' or '.join('config.' + name for name in names)}?"


def flat(tree: dict, prefix: str = "") -> dict:
    """A nested dict as one of dotted paths."""
    out = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            out |= flat(value, f"{prefix}{name}.")
        else:
            out[prefix + name] = value
    return out
