#pragma once

#include <map>
#include <string>

#include "lockstep/comm/process_group.h"

namespace lockstep {

/// Values as text, by the name under which the user knows them.
using Settings = std::map<std::string, std::string>;

/// Throws MismatchError on every rank when ranks differ. It says each name, two ranks and both
/// their values. A collective.
void check_same_settings(const Settings& mine, const ProcessGroup& group);

}  // namespace lockstep
