#pragma once

#include <string>

namespace lockstep::tool {

/// The help page of a command such as "lockstep train" as a page for man(1). `release` is
/// "0.1.0,2026-12-31".
std::string man_page(const std::string& command, const std::string& summary,
                     const std::string& help, const std::string& release);

}  // namespace lockstep::tool
