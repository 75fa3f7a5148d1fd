"""The parts into which a run under compute-sanitizer is divided."""
from tests.csrc.sanitize import selected
from tests.csrc.test_kernels import KERNELS


def test_shards_are_the_whole():
    names = lambda keys, shard: [name for name, _ in selected(keys, shard)]
    everything = names("", "0/1")
    assert set(KERNELS) < set(everything)
    assert sorted(sum((names("", f"{i}/3") for i in range(3)), [])) == sorted(everything)
    assert all(name.startswith("row_kernels") for name in names("^row_", "0/1")) and names("^row_", "0/1")
