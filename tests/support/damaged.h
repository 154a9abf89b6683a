#pragma once

#include <cstdint>
#include <string>

#include "lockstep/base/random.h"

namespace lockstep {

/// One to four changes: a bit, a byte, a number of all ones, a cut, a doubled or a removed piece.
inline std::string damaged(std::string content, KeyedRandom& random) {
  const uint64_t changes = 1 + random.below(4);
  for (uint64_t i = 0; i < changes && !content.empty(); ++i) {
    const size_t at = random.below(content.size());
    const size_t length = std::min<size_t>(1 + random.below(8), content.size() - at);
    switch (random.below(7)) {
      case 0:
        content[at] = static_cast<char>(content[at] ^ (1 << random.below(8)));
        break;
      case 1:
        content[at] = static_cast<char>(random.below(256));
        break;
      case 2:
        content.replace(at, length, std::string(length, '\xff'));
        break;
      case 3:
        content.resize(at);
        break;
      case 4:
        content.insert(at, content.substr(at, length));
        break;
      case 5:
        content.erase(at, length);
        break;
      default:  // digits are where the sizes of text headers are
        for (size_t d = at; d < content.size(); ++d) {
          if (content[d] < '0' || content[d] > '9') continue;
          content[d] = static_cast<char>('0' + random.below(10));
          break;
        }
    }
  }
  return content;
}

}  // namespace lockstep
