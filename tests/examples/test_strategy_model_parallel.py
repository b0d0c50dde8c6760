import re

import pytest

from tests.cifar10_slice import unpack_slice
from tests.examples.scripts import run_example

pytestmark = pytest.mark.slow


@pytest.mark.timeout(300)
def test_model_parallel_script_puts_alexnets_layers_on_two_devices(prewarmed, tmp_path):
    folder = unpack_slice(tmp_path / "data", num_per_class=2)
    first, second, sent = run_example(prewarmed, "strategy_model_parallel.py", tmp_path, str(folder)).splitlines()
    convolutions, classifier = (int(re.search(r"([\d,]+) bytes", line)[1].replace(",", "")) for line in (first, second))
    assert convolutions == 4 * sum(9 * a * b + b for a, b in ((3, 64), (64, 192), (192, 384), (384, 256), (256, 256)))
    assert classifier == 4 * sum(a * b + b for a, b in ((4096, 1024), (1024, 1024), (1024, 10)))
    # 256 channels of 4 x 4 pixels over the cut, 10 classes back, and the gradients of both
    assert f"{2 * 16 * 4 * (256 * 4 * 4 + 10):,} bytes" in sent
