#include "lockstep/base/failure.h"

#include <algorithm>
#include <array>

#include "lockstep/base/bytes.h"
#include "lockstep/base/hash.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

using Kind = Failure::Kind;

constexpr std::array<std::string_view, 10> kKindNames{"unknown",  "ended",       "left", "closed",
                                                      "gave_up",  "unreachable", "late", "stuck",
                                                      "mismatch", "store_lost"};
constexpr uint32_t kMark = 0x316c4146;
constexpr int kMostCauses = 8;

std::string who(const Failure::Rank& rank) {
  std::string text = "rank " + std::to_string(rank.number);
  if (rank.process > 0) text += " (process " + std::to_string(rank.process) + ")";
  if (rank.host.size() < 2) return text;
  std::vector<std::string> numbers;
  for (const int number : rank.host) numbers.push_back(std::to_string(number));
  const std::string last = numbers.back();
  numbers.pop_back();
  return text + ", which speaks for ranks " + join(numbers, ", ") + " and " + last +
         " of its host,";
}

std::string what_became_of(const Failure::Rank& rank, const Failure& failure) {
  switch (rank.kind) {
    case Kind::ended:
      return " has ended";
    case Kind::left:
      return left_after(rank.steps);
    case Kind::closed:
      return " has closed the group";
    case Kind::gave_up:
      return " has given the group up";
    case Kind::unreachable:
      return " has ended or cannot be reached any more";
    case Kind::late:
      if (failure.kind == Kind::gave_up) return " had not come";
      if (rank.calls < 0 || rank.calls >= failure.calls) return " did not come";
      return " did not come (it has called " + std::to_string(rank.calls) + " of the group's " +
             std::to_string(failure.calls) + " collectives)";
    case Kind::stuck:
      return " came but does not go on";
    default:
      return "";
  }
}

/// Ranks that have ended share the verb.
std::string describe_ranks(const Failure& failure) {
  std::vector<std::string> parts, ended;
  for (const auto& rank : failure.ranks) {
    if (rank.kind == Kind::ended) {
      ended.push_back(who(rank));
    } else {
      parts.push_back(who(rank) + what_became_of(rank, failure));
    }
  }
  if (!ended.empty())
    parts.insert(parts.begin(),
                 join(ended, ", ") + (ended.size() == 1 ? " has" : " have") + " ended");
  return join(parts, failure.timed_out() || failure.kind == Kind::gave_up ? "; " : ", ");
}

void write(ByteWriter& out, const Failure& failure, int causes) {
  out.number(failure.kind);
  out.number(failure.calls);
  out.number(failure.waited_ms);
  out.text(failure.detail);
  out.text(failure.text);
  out.count(failure.ranks.size());
  for (const auto& rank : failure.ranks) {
    out.number(rank.kind);
    out.number(rank.number);
    out.number(rank.process);
    out.number(rank.steps);
    out.number(rank.calls);
    out.numbers(rank.host);
    out.numbers(rank.asked_group);
  }
  const bool more = failure.cause && causes > 0;
  out.number(more);
  if (more) write(out, *failure.cause, causes - 1);
}

Kind read_kind(ByteReader& in) {
  const auto value = in.number<uint8_t>();
  in.expect(value < kKindNames.size());
  return static_cast<Kind>(value);
}

Failure read(ByteReader& in, int causes) {
  Failure failure;
  failure.kind = read_kind(in);
  failure.calls = in.number<int64_t>();
  failure.waited_ms = in.number<int64_t>();
  failure.detail = in.text();
  failure.text = in.text();
  in.times([&] {
    auto& rank = failure.ranks.emplace_back();
    rank.kind = read_kind(in);
    rank.number = in.number<int>();
    rank.process = in.number<int>();
    rank.steps = in.number<int64_t>();
    rank.calls = in.number<int64_t>();
    rank.host = in.numbers<int>();
    rank.asked_group = in.numbers<int>();
  });
  if (in.number<uint8_t>() != 0 && in.ok() && causes > 0)
    failure.cause = std::make_shared<const Failure>(read(in, causes - 1));
  return failure;
}

std::string encode_whole(const Failure& failure, int causes) {
  ByteWriter body, out;
  write(body, failure, causes);
  out.number(kMark);
  out.number(fnv1a(body.bytes()));
  out.text(body.bytes());
  return out.bytes();
}

}  // namespace

bool Failure::has(Kind what) const {
  const auto is = [&](const Rank& rank) { return rank.kind == what; };
  return kind == what || std::any_of(ranks.begin(), ranks.end(), is) || (cause && cause->has(what));
}

bool Failure::concerns(int rank) const {
  const auto is = [&](const Rank& one) {
    return one.number == rank ||
           std::find(one.host.begin(), one.host.end(), rank) != one.host.end();
  };
  return std::any_of(ranks.begin(), ranks.end(), is) || (cause && cause->concerns(rank));
}

void Failure::add(const Failure& other) {
  if (kind == Kind::unknown || other.kind == Kind::left) kind = other.kind;
  ranks.insert(ranks.end(), other.ranks.begin(), other.ranks.end());
  detail += other.detail;
  if (!cause) cause = other.cause;
}

std::string_view name_of(Kind kind) {
  return kKindNames.at(static_cast<size_t>(kind));
}

std::optional<Kind> failure_kind_named(std::string_view name) {
  const auto found = std::find(kKindNames.begin(), kKindNames.end(), name);
  if (found == kKindNames.end()) return std::nullopt;
  return static_cast<Kind>(found - kKindNames.begin());
}

std::string describe(const Failure& failure) {
  if (!failure.text.empty()) return failure.text;
  std::string text = describe_ranks(failure);
  if (failure.waited_ms > 0)
    text += " within " + seconds_text(std::chrono::milliseconds(failure.waited_ms));
  text += failure.detail;
  return failure.cause ? text + ": " + describe(*failure.cause) : text;
}

std::string left_after(int64_t steps) {
  return " left its loop after " + std::to_string(steps) + (steps == 1 ? " step" : " steps");
}

std::string encode(const Failure& failure, size_t most) {
  for (int causes = kMostCauses; causes >= 0; --causes)
    if (auto bytes = encode_whole(failure, causes); bytes.size() <= most) return bytes;
  Failure cut = failure;
  for (std::string* words : {&cut.detail, &cut.text}) {
    const size_t bytes = encode_whole(cut, 0).size(), over = bytes - std::min(bytes, most);
    words->resize(words->size() - std::min(over, words->size()));
  }
  auto bytes = encode_whole(cut, 0);
  for (; bytes.size() > most; bytes = encode_whole(cut, 0)) cut.ranks.pop_back();
  return bytes;
}

std::optional<Failure> decode_failure(std::string_view bytes) {
  ByteReader head(bytes);
  const auto mark = head.number<uint32_t>(), sum = head.number<uint32_t>();
  const std::string_view body = head.text();
  if (!head.ok() || mark != kMark || sum != fnv1a(body)) return std::nullopt;
  ByteReader in(body);
  Failure failure = read(in, kMostCauses);
  if (!in.ok()) return std::nullopt;
  return failure;
}

}  // namespace lockstep
