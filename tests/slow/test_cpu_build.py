"""A cached library of kernels for CPUs that others could have written."""

import hashlib

from tests.attention.test_cpu_build import chosen, needs_compiler


@needs_compiler
def test_a_library_that_others_could_have_written_is_not_loaded(tmp_path):
    """With the right digest beside it, too; the kernels are made for the process."""
    assert chosen(tmp_path) == ("cpu", "")
    (library,) = tmp_path.rglob("*.so")
    planted = b"a library planted by another user"
    library.write_bytes(planted)
    library.with_suffix(".sha256").write_text(hashlib.sha256(planted).hexdigest())
    library.parent.chmod(0o777)
    assert chosen(tmp_path) == ("cpu", "")
    assert library.read_bytes() == planted
