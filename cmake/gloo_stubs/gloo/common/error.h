#pragma once
// ProcessGroupGloo.hpp includes this header and uses nothing of it; see ../../README.md.
#include <stdexcept>
