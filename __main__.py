"""The command `headcount`: headcount train --config=configs/numbers.py --workdir=..."""

import importlib
import importlib.util
import sys

SCRIPTS = ("train", "eval", "predict", "heads", "sweep", "weights")


def main() -> None:
    """Run the script named by the first argument, with the other arguments as flags."""
    if sys.argv[1:] in (["--help"], ["-h"]):
        print(f"Usage: headcount COMMAND [FLAGS]. Commands: {', '.join(SCRIPTS)}.")
        print("headcount COMMAND --help says what a command does and lists its flags.")
        return
    if len(sys.argv) < 2 or sys.argv[1] not in SCRIPTS:
        print(
            f"headcount: the first argument must be one of {', '.join(SCRIPTS)}; "
            f"headcount train --help shows its flags.",
            file=sys.stderr,
        )
        sys.exit(2)
    if importlib.util.find_spec("flax") is None:
        print(
            "headcount: only attention is installed; pip install 'headcount[lab]' "
            "installs what the scripts need.",
            file=sys.stderr,
        )
        sys.exit(2)
    sys.argv = [f"{sys.argv[1]}.py", *sys.argv[2:]]
    name = sys.argv[0].removesuffix(".py")
    importlib.import_module(f"headcount.{name}").cli()


if __name__ == "__main__":
    main()
