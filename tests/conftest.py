"""Settings of the whole test run."""

import torch

# The tensors are small: a second thread mostly spins. On a busy machine of two cores the suite took up to ten times as
# long with two threads. With a GPU the references are larger, and the cores are many.
if not torch.cuda.is_available():
    torch.set_num_threads(1)
