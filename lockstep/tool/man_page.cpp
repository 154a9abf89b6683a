#include "lockstep/tool/man_page.h"

#include <algorithm>

#include "lockstep/base/text.h"

namespace lockstep::tool {
namespace {

/// A text in roff: nothing in it is a request or an escape.
std::string roff_text(const std::string& text) {
  const std::string plain = "\\-`'^~";
  const char* const escapes[] = {"\\e", "\\-", "\\(ga", "\\(aq", "\\(ha", "\\(ti"};
  std::string out;
  for (const char c : text) {
    if (c == '.' && (out.empty() || out.back() == '\n')) out += "\\&";
    const size_t special = plain.find(c);
    out += special == std::string::npos ? std::string(1, c) : escapes[special];
  }
  return out;
}

}  // namespace

std::string man_page(const std::string& command, const std::string& summary,
                     const std::string& help, const std::string& release) {
  std::string name = command, title = command;
  std::replace(name.begin(), name.end(), ' ', '-');
  for (char& c : title) c = c == ' ' ? '-' : static_cast<char>(std::toupper(c));
  std::string first = summary.substr(0, summary.find(". "));
  first.erase(first.find_last_not_of('.') + 1);
  const auto parts = split(release + ",", ',');
  return ".TH " + title + " 1 " + parts[1] + " \"lockstep " + parts[0] + "\" Lockstep\n.SH NAME\n" +
         roff_text(name) + " \\- " + roff_text(first) + "\n.SH DESCRIPTION\n.nf\n" +
         roff_text(help) + ".fi\n";
}

}  // namespace lockstep::tool
