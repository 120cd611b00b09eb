"""Command line: shared flags, config overrides, one-line errors."""

import contextlib
import errno
import os
import re
import shlex
import signal
import sys
import textwrap
import traceback
from difflib import get_close_matches
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict
from ml_collections.config_flags import register_flag_parser_for_type

from headcount.configs.validation import (
    check_values,
    flat_config,
    known_keys,
    near_miss,
)

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run (or sweep).")
DIRECTORY = flags.DEFINE_string(
    "directory", None, "Folder of local data files; default: the run's data.directory."
)
TASK_FILE = flags.DEFINE_string(
    "task_file", None, "Python file that adds a task or a merge rule of your own."
)


def next_command(script: str, **values) -> str:
    """Return a command for the user to run next, with this one's --task_file.

    Args:
        script: script, and verb if it has any.
        values: values of flags.
    """
    if TASK_FILE.value is not None:
        values["task_file"] = TASK_FILE.value
    words = [f"--{name}={value}" for name, value in values.items()]
    return shlex.join(["python", *script.split(), *words])


KEYS = (  # for --help
    "set any key of configs/base.py, which says what each means, as in "
    "--config.model.attention.num_heads=8 --config.train.num_steps=2000; "
    "docs/reference/config.md lists them all."
)
WANTED = {  # expected kind of value, by the flag parsers' error messages
    "invalid literal for int()": "a whole number",
    "could not convert string to float": "a number",
    "('Non-boolean argument": "true or false",
}
LESS_MEMORY = {  # advice on how to save memory, by script
    "train.py": "Fewer trials (seeds, or --group_size of a sweep), a lower "
    "data.batch_tokens, a higher train.accumulate_steps or train.remat=block needs",
    "eval.py": "A lower --beam_size or --batch_size needs",
}
_FREE = "; free some space and rerun the same command"
FIXES = {  # by the number of an OSError
    errno.ENOENT: "; check the path",
    errno.EISDIR: "; name a file",
    errno.ENOSPC: _FREE,
    errno.EDQUOT: _FREE,
}
# JAX raises the same type for all device errors, without an error code
EXHAUSTED = re.compile(
    r"RESOURCE_EXHAUSTED.*(out of memory|allocat)|Out of memory allocating"
    r"|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_(NOT_INITIALIZED|ALLOC_FAILED)",
    re.I | re.DOTALL,
)


@contextlib.contextmanager
def one_sentence(kinds=(ValueError, OSError, NotImplementedError)):
    """Turn errors that the user can fix into one line and exit code 2.

    For code that reads flags, configs and files. Errors elsewhere are bugs, which
    should show a traceback, except if memory is exhausted.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # `run` handles it
    except kinds as error:
        fail(describe(error))
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not EXHAUSTED.search(str(error)):
            raise
        message = str(error).removeprefix("RESOURCE_EXHAUSTED: ")
        cause = message.split("\n")[0].rstrip(".")
        less = LESS_MEMORY.get(script(), "A smaller model needs")
        fail(f"Out of memory ({cause or 'on the host'}). {less} less.")


def script() -> str:
    """Return the name of the running script."""
    return sys.argv[0].rsplit("/", 1)[-1]


def fail(sentence: str) -> None:
    """Print one line on standard error and exit with code 2."""
    print(f"{script()}: {sentence}", file=sys.stderr, flush=True)
    sys.exit(2)


def describe(error: BaseException) -> str:
    """Return an error's message in one line."""
    if isinstance(error, FileExistsError | NotADirectoryError):
        path = Path(error.filename)
        ancestors = (path, *path.parents)
        file = next((part for part in ancestors if part.is_file()), path)
        return f"{file} is a file where a folder is needed; choose another."
    if isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if error.filename else ""
        fix = FIXES.get(error.errno, "")
        return f"{name}{error.strerror}{fix}."
    return " ".join(str(error).split())


def check_flag_files() -> None:
    """Exit with one sentence if --flagfile can't be read."""
    try:
        flags.FLAGS.read_flags_from_files(sys.argv[1:], force_gnu=False)
    except (flags.Error, OSError, ValueError) as error:
        fail(f"--flagfile can't be read: {describe(error)}")


check_flag_files()  # now, because defining a config flag reads them


def run(main) -> None:
    """Parse the flags and call `main()`; report a bad flag in one sentence."""
    replace_closed()
    sys.argv[1:] = map(find_config, join_config(sys.argv[1:]))
    if {"--help", "-h"} & {*sys.argv[1:]}:
        print(usage(sys.modules[main.__module__]))
        return
    take_none()
    try:
        unexpected = flags.FLAGS(sys.argv)[1:]
        if "config" in flags.FLAGS and flags.FLAGS["config"].present:
            check_config_flag(flags.FLAGS.config)
    except (Exception, SystemExit) as error:
        sentence = flag_error(error, sys.argv[1:])
        if sentence is None:
            raise
        fail(sentence)
    used = own_flags(sys.modules[main.__module__])
    for flag in (WORKDIR, DIRECTORY, TASK_FILE):
        if flag.present and flag.name not in used:
            fail(f"--{flag.name} has no meaning for {script()}.")
    if unexpected:
        hint = ", and give texts as standard input: < FILE" * (script() == "predict.py")
        fail(
            f"Unexpected argument {unexpected[0]!r}; write flags as --name=value{hint}."
        )
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # of runtime.bootstrap
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe; avoid an error at exit, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:  # in scripts that have nothing to save
        print(f"{script()}: interrupted.", file=sys.stderr, flush=True)
        sys.exit(130)
    finally:  # a KeyboardInterrupt in what runs at exit would print a traceback
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def own_names() -> set[str]:
    """Return the names of this project's flags that the running script has."""
    return {
        flag.name
        for name, defined in flags.FLAGS.flags_by_module_dict().items()
        if name.startswith("headcount.") or name == sys.argv[0]
        for flag in defined
    }


def own_flags(module) -> set[str]:
    """Return the names of the flags that a script defines or imports."""
    return {x.name for x in vars(module).values() if isinstance(x, flags.FlagHolder)}


def usage(module) -> str:
    """Return the text of --help: a script's docstring, and its flags by purpose.

    Flags for distributed runs are listed separately.
    """
    used = own_flags(module)
    titles = {False: "Flags:", True: "Flags of runs of several processes:"}
    groups = {is_cluster: [] for is_cluster in titles}
    for name, defined in flags.FLAGS.flags_by_module_dict().items():
        if name.startswith("headcount.") or name == sys.argv[0]:
            shared = name == __name__  # each script uses some of these
            shown = [f for f in defined if f.name in used or not shared]
            groups[name.endswith("runtime.cluster")] += shown
    lines = [(module.__doc__ or "").strip()]
    for is_cluster, title in titles.items():
        by_name = {f.name: f for f in groups[is_cluster] if "." not in f.name}
        lines += ["", title] if by_name else []
        for name in sorted(by_name):
            flag = by_name[name]
            default = "" if flag.default in (None, []) else f" [{flag.default}]"
            text = " ".join(flag.help.split(";\n")[0].split())  # the rest is absl's
            lines += [f"  --{name}: {text}{default}"]
    if "config" in flags.FLAGS:
        lines += ["", "Config keys:", "  --config.KEY=VALUE: " + KEYS]
    wide = {"width": 88, "subsequent_indent": "    ", "break_on_hyphens": False}
    return "\n".join(
        textwrap.fill(line, **wide) if line.startswith("  --") else line
        for line in lines
    )


def join_config(argv: list[str]) -> list[str]:
    """Join `--config FILE` into one argument, `--config=FILE`."""
    words = iter(argv)
    return [
        f"--config={next(words, '')}" if word in ("--config", "-config") else word
        for word in words
    ]


def find_config(argument: str) -> str:
    """Resolve --config=configs/X.py to the package's file if there is no local one."""
    match = re.fullmatch(r"(--?config=)(configs/\w+\.py)(:.*)?", argument)
    package = Path(__file__).parent.parent
    if match is None or Path(match[2]).exists() or not (package / match[2]).exists():
        return argument
    return f"{match[1]}{package / match[2]}{match[3] or ''}"


def replace_closed() -> None:
    """Replace standard streams that are closed at startup (`<&-`) by os.devnull.

    Otherwise, the next opened file gets the stream's descriptor, and libraries write
    their warnings to it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def take_none() -> None:
    """Make flags of config keys accept None; `check_values` checks which keys may."""
    parsers = {
        int: flags.IntegerParser,
        float: flags.FloatParser,
        bool: flags.BooleanParser,
        str: flags.ArgumentParser,
    }
    for kind, parser in parsers.items():

        class OrNone(parser):
            """Parse a value of a type, or None."""

            def parse(self, argument):
                return None if argument == "None" else super().parse(argument)

        register_flag_parser_for_type(kind, OrNone())


def path_of(flag) -> Path:
    """Return the path that a flag names, with ~ expanded; exit if it is invalid."""
    if not flag.value:  # for example, an unset shell variable
        fail(f"--{flag.name} is empty; name a file or folder.")
    path = Path(os.path.expanduser(flag.value))
    try:
        os.path.abspath(path).encode()
    except UnicodeEncodeError:  # Orbax would only fail at the first checkpoint
        fail(f"--{flag.name}={os.fsencode(path)!r} is not UTF-8; rename it.")
    if "\0" in str(path):
        fail(f"--{flag.name}={flag.value!r} has a NUL character in it.")
    return path


def check_config_flag(config) -> None:
    """Raise a ValueError if a config's keys or values are invalid."""
    if not isinstance(config, ConfigDict):
        # the placeholder for an unreadable file raises its OSError on any access
        getattr(config, "keys", None)
        kind = "None" if config is None else type(config).__name__
        raise ValueError(
            f"The config file's get_config() must return a ConfigDict, got {kind}; "
            f"start from get_config() of configs/base.py."
        )
    values, types = flat_config(config.to_dict()), known_keys()
    for key in values.keys() - types.keys():
        raise ValueError(
            f"The config file sets {key}, which is not a config key.{near_miss(key)}"
        )
    for key in types.keys() - values.keys():
        raise ValueError(
            f"The config file lacks {key}; start from get_config() of configs/base.py."
        )
    check_values(values)


def flag_error(error: BaseException, argv: list[str]) -> str | None:
    """Return a sentence that names the wrong flag or key, and suggests others.

    Return None if the error does not come from the command line or the config file.
    """
    path = config_path(argv)
    raised = error_in_file(error, path) if path else None
    if raised is not None:
        original, line = raised
        place = f"{path}, line {line}"
        if isinstance(original, SyntaxError):
            location = f"{original.filename}, line {original.lineno}"
            return f"{location}, is not Python: {original.msg}."
        if isinstance(original, KeyError | AttributeError) and is_of_config(original):
            key = unknown_key(original)
            return f"{place}, uses {key}, not a config key.{near_miss(key)}"
        message = describe(original)
        if not isinstance(original, ValueError) or not message:
            message = f"{type(original).__name__}: {message}".removesuffix(": ")
        return f"{place}: {message}"
    text = str(error)
    if isinstance(error, SyntaxError):
        return f"{path} is not Python: {error.msg}."
    if isinstance(error, KeyError | AttributeError):  # an unknown key of a config
        if path and isinstance(error, AttributeError) and error.name == "get_config":
            return f"{path} has no function get_config(); see configs/base.py."
        key = unknown_key(error)
        names = [arg.split("=")[0].lstrip("-") for arg in argv]
        name = next((name for name in names if f".{key}" in name), None)
        if name is None:
            return None
        hint = near_miss(name.split(".", 1)[-1], prefix="config.")
        return f"There is no config key {name}.{hint}"
    if isinstance(error, OSError):
        return f"There is no config file {path}; see the folder configs/."
    if isinstance(error, flags.Error) or type(error) in (ValueError, TypeError):
        return bad_flag(text)
    return None


def config_path(argv: list[str]) -> str | None:
    """Return the config file's path on a command line, or None."""
    paths = [b for a, b in zip(argv, argv[1:], strict=False) if a == "--config"]
    paths += [a.split("=", 1)[1] for a in argv if re.match("--?config=", a)]
    return paths[-1].split(":")[0] if paths else None


def error_in_file(error: BaseException, path: str) -> tuple | None:
    """Return the error that a file's own code raised and its line, or None.

    Libraries wrap errors in other errors, so search all causes.
    """
    chain = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    for error in reversed(chain):  # from the one that was raised first
        if isinstance(error, SyntaxError) and error.filename == path:
            return error, error.lineno
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == path]
        if lines:
            return error, lines[-1]
    return None


def is_of_config(error: BaseException) -> bool:
    """Return whether ml_collections raised an error."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return "ml_collections" in Path(last.filename).parts


def unknown_key(error: KeyError | AttributeError) -> str:
    """Return the key that ml_collections did not find."""
    return re.findall(r"\w+", str(error).replace("\\n", " "))[0]


def bad_flag(text: str) -> str:
    """Rephrase absl's message about a flag that it can't parse."""
    for words, kind in WANTED.items():
        flag, separator, _ = text.partition(f": {words}")
        if separator and "\n" not in flag:
            name, value = flag.removeprefix("flag ").split("=", 1)
            return f"{name} must be {kind}, got {value!r}."
    if match := re.fullmatch(r"Unknown command line flag '(\w+)'.*", text, re.DOTALL):
        name = match[1]
        near = get_close_matches(name, own_names(), n=1)
        if near:
            return f"There is no flag --{name}. Did you mean --{near[0]}?"
        keys = [key for key in known_keys() if key.rpartition(".")[2] == name]
        if keys and "config" in flags.FLAGS:
            keys = " or ".join(f"--config.{key}" for key in keys)
            return f"There is no flag --{name}. Did you mean {keys}?"
        return f"There is no flag --{name}. --help lists them."
    last = text.splitlines()[-1]  # after a traceback of the config file
    head = text.splitlines()[0].split(": Error whilst")[0]
    if "get_config() takes 0 positional arguments" in last:
        return f"{head}: this config has no variants; leave out the colon."
    return last if last.startswith(head) else f"{head}: {last.split(': ', 1)[-1]}"
