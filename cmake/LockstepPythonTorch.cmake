# For the wheel: the folder of the torch that is installed beside the Python that it is built for. It is
# LOCKSTEP_PYTHON_TORCH, and wins over all other LibTorch. pip may build in an environment of its own, which
# lacks torch: then the one of the surrounding environment counts.
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(
  COMMAND
    ${Python_EXECUTABLE} -c
    "
import importlib.util, os, site, sysconfig
spec = importlib.util.find_spec('torch')
folders = [os.path.dirname(spec.origin)] if spec and spec.origin else []
for parent in (sysconfig.get_path('platlib'), sysconfig.get_path('purelib'), *site.getsitepackages()):
    folders.append(os.path.join(parent, 'torch'))
for folder in folders:
    if os.path.exists(os.path.join(folder, 'version.py')):
        values = {}
        exec(open(os.path.join(folder, 'version.py')).read(), values)
        print(folder, values['__version__'], sep=';', end='')
        break
"
  OUTPUT_VARIABLE found COMMAND_ERROR_IS_FATAL ANY)
if(NOT found)
  message(FATAL_ERROR "lockstep needs torch beside ${Python_EXECUTABLE}: pip install torch, then build again")
endif()
list(GET found 0 LOCKSTEP_PYTHON_TORCH)
list(GET found 1 LOCKSTEP_PYTHON_TORCH_VERSION)
