"""`python -m lockstep --cmake-prefix-path`; all else is the command `lockstep`."""

import sys

import lockstep
from lockstep_autoload import main

if sys.argv[1:] == ["--cmake-prefix-path"]:
    print(lockstep.cmake_prefix_path)
else:
    main()
