"""Settings of a process: the folder of its compiled programs."""

import pytest

from headcount.runtime import platform

X86 = "model name\t: Xeon\nflags\t\t: {}\n"
ARM = "Features\t: {}\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"


@pytest.mark.parametrize("text", [X86, ARM])
def test_processors_with_other_features_do_not_share_programs(
    tmp_path, monkeypatch, text
):
    """A program that uses a missing instruction would crash."""
    monkeypatch.setattr(platform, "CPUINFO", tmp_path / "cpuinfo")
    found = []
    for features in ("fp asimd", "fp asimd sve"):
        core = f"processor\t: 0\n{text.format(features)}\n"
        platform.CPUINFO.write_text(core)
        found.append(platform.fingerprint())
        platform.CPUINFO.write_text(core + core.replace(": 0\n", ": 1\n"))
        assert platform.fingerprint() == found[-1]  # however many cores there are
    assert found[0] != found[1]
