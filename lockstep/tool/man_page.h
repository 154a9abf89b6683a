#pragma once

#include <string>

namespace lockstep::tool {

struct HelpPage;

/// A text in roff: nothing in it is a request or an escape.
std::string roff_text(const std::string& text);

/// The head of a page of section 1: ".TH" and the name. `command` is "lockstep train", `release` is
/// "0.1.0,2026-12-31".
std::string man_head(const std::string& command, const std::string& summary,
                     const std::string& release);

/// A command below what it shows, which may be empty.
std::string man_example(const std::string& line, const std::string& what);

/// What --help-all says, as a page for man(1).
std::string man_page(const HelpPage& page, const std::string& release);

}  // namespace lockstep::tool
