import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The tensors are small: threads that wait for each other take most of the time where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
