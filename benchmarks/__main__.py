"""`make bench`: every benchmark that ends in minutes, each in a process of its own. `make crash` is the long one."""

import subprocess
import sys

MODULES = ("benchmarks.startup", "benchmarks.money")

for module in MODULES:
    print(module, file=sys.stderr)
    subprocess.run([sys.executable, "-m", module], check=True)
