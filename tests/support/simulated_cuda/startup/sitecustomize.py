"""On the path of Python it gives each process that starts the simulated device, before anything asks for one."""

from tests.support.simulated_cuda.install import install

install()
