#include "lockstep/tool/man_page.h"

#include <algorithm>
#include <cctype>

#include "lockstep/base/text.h"
#include "lockstep/tool/cli_help.h"

namespace lockstep::tool {
namespace {

std::string upper(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return text;
}

/// "lockstep train" is the page lockstep-train.
std::string page_name(std::string command) {
  std::replace(command.begin(), command.end(), ' ', '-');
  return command;
}

/// A paragraph below a tag: what is typed in bold, what it stands for in italics.
std::string tagged(const std::string& bold, const std::string& italic, const std::string& text) {
  std::string tag = bold.empty() ? "" : "\\fB" + roff_text(bold) + "\\fR";
  if (!italic.empty()) tag += (tag.empty() ? "\\fI" : " \\fI") + roff_text(italic) + "\\fR";
  return ".TP\n" + tag + "\n" + roff_text(text) + "\n";
}

}  // namespace

std::string roff_text(const std::string& text) {
  std::string out = text.starts_with('.') || text.starts_with('\'') ? "\\&" : "";
  const std::string plain = "\\-`'^~";
  const char* const escapes[] = {"\\e", "\\-", "\\(ga", "\\(aq", "\\(ha", "\\(ti"};
  for (const char c : text) {
    const size_t special = plain.find(c);
    out += special == std::string::npos ? std::string(1, c) : escapes[special];
  }
  return out;
}

std::string man_head(const std::string& command, const std::string& summary,
                     const std::string& release) {
  const std::string name = page_name(command);
  const auto parts = split(release + ",", ',');
  return ".TH " + upper(name) + " 1 " + parts[1] + " \"lockstep " + parts[0] +
         "\" Lockstep\n.SH NAME\n" + roff_text(name) + " \\- " + roff_text(summary) + "\n";
}

std::string man_example(const std::string& line, const std::string& what) {
  const std::string heading = what.empty() ? "" : roff_text(what) + ":\n";
  return heading + ".RS 4\n.nf\n" + roff_text(line) + "\n.fi\n.RE\n";
}

std::string man_page(const HelpPage& page, const std::string& release) {
  const std::string first = page.summary.substr(0, page.summary.find(". "));
  std::string text =
      man_head(page.command, first.substr(0, first.find_last_not_of('.') + 1), release) +
      ".SH SYNOPSIS\n\\fB" + roff_text(page.command) + "\\fR" +
      roff_text(page.usage().substr(page.command.size())) + "\n.SH DESCRIPTION\n" +
      roff_text(page.summary) + "\n";
  for (const auto& info : page.positionals) text += tagged("", info.name, info.help);
  if (!page.trailing_name.empty()) text += tagged("", page.trailing_name, page.trailing_help);
  for (const auto& group : page.headings()) {
    text += ".SH " + upper(group) + "\n";
    for (const auto& info : page.options) {
      if (info.group != group) continue;
      const bool has_default = !info.shown_default.empty();
      text += tagged(join(info.names, ", "), info.placeholder,
                     info.help + (has_default ? " [" + info.shown_default + "]" : ""));
    }
  }
  if (!page.examples.empty()) text += ".SH EXAMPLES\n";
  for (const auto& [line, what] : page.examples) text += man_example(line, what);
  return text + ".SH SEE ALSO\n\\fBlockstep\\fR(1)\n";
}

}  // namespace lockstep::tool
