#include "lockstep/elastic/leader.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"

namespace lockstep::elastic {
namespace {

/// Whoever gave a node_rank gets that place, as far as there are hosts for those before it. The
/// others keep their order.
std::vector<std::string> in_places(
    const std::vector<std::pair<std::string, std::optional<int>>>& agents) {
  std::vector<std::string> order;
  std::map<int, std::string> placed;
  for (const auto& [id, node_rank] : agents) {
    if (node_rank) {
      placed[*node_rank] = id;
    } else {
      order.push_back(id);
    }
  }
  for (const auto& [place, id] : placed)
    order.insert(order.begin() + std::min<std::ptrdiff_t>(place, std::ssize(order)), id);
  return order;
}

}  // namespace

void Leader::take(const Changed& changed, Time now) {
  const auto id_of = [](const std::string& key) {
    return key.substr(std::string(kAgentsPrefix).size());
  };
  if (changed.whole) {
    agents_.clear();
    alone_since_.reset();  // Someone may have come and gone unseen.
    has_view_ = true;
    counted_at_ = now;
  }
  for (const auto& key : changed.erased) {
    if (agents_.erase(id_of(key))) counted_at_ = now;
  }
  for (const auto& entry : changed.written) {
    if (awaited_.count(id_of(entry.key))) alone_since_.reset();
    try {
      auto& seen = agents_[id_of(entry.key)];
      auto record = decode_agent(entry.value);
      if (seen.revision == 0 || record.leaving != seen.record.leaving) counted_at_ = now;
      seen = {std::move(record), entry.revision};
    } catch (const DataError&) {
      agents_.erase(id_of(entry.key));  // Not an agent of ours.
    }
  }
}

const Leader::Seen* Leader::find(const std::string& agent) const {
  const auto found = agents_.find(agent);
  return found == agents_.end() ? nullptr : &found->second;
}

/// Of the current generation of this job.
const std::vector<Member>& Leader::members() const {
  return fresh_ ? none_->members : current_->members;
}

std::string Leader::missing() const {
  std::set<int> places;
  for (const auto& [_, seen] : agents_) places.insert(seen.record.node_rank.value_or(-1));
  int first = 0;
  while (places.count(first)) ++first;
  return places.count(-1)
             ? "so far " + counted(static_cast<int64_t>(agents_.size()), "host") + " came"
             : "host " + std::to_string(first) + " has not come";
}

bool Leader::is_alone(const std::string& id) const {
  return has_view_ && std::all_of(agents_.begin(), agents_.end(), [&](const auto& entry) {
           return entry.first == id || entry.second.record.hosts_registry;
         });
}

void Leader::wake(Time at, Time now) {
  if (at > now && (!deadline_ || at < *deadline_)) deadline_ = at;
}

Leader::Fate Leader::fate_of(const Member& member) const {
  if (done_.count(member.agent)) return Fate::done;
  const auto* seen = find(member.agent);
  if (!seen) return Fate::gone;
  const auto& report = seen->record.report;
  const auto state = report.generation == current_->number ? report.state : Report::State::none;
  if (state == Report::State::failed) return Fate::failed;
  if (seen->record.leaving) return Fate::leaving;
  if (state == Report::State::stopped) return Fate::needs_next;
  const bool started = state == Report::State::running || seen->record.life == member.life;
  return started ? Fate::there : Fate::needs_next;
}

/// Remembers who is done and which generations run no longer: the agent that said so may go.
void Leader::note_ends() {
  const auto has_ended = [&](int64_t number, const std::string& agent) {
    const auto* seen = find(agent);
    if (!seen) return false;
    const auto& report = seen->record.report;
    if (report.generation != number) return report.generation > number;
    return report.state != Report::State::none && report.state != Report::State::running;
  };
  for (const auto& member : members()) {
    if (!has_ended(current_->number, member.agent)) continue;
    idle_.insert(current_->number);
    if (find(member.agent)->record.report.state == Report::State::done) done_.insert(member.agent);
  }
  for (const auto& earlier : current_->earlier) {
    for (const auto& agent : earlier.agents) {
      if (has_ended(earlier.number, agent)) idle_.insert(earlier.number);
    }
  }
}

/// The first one that is no consequence of another, or that has waited long enough for its cause.
const Report* Leader::failure(Time now) {
  const Seen* first = nullptr;
  for (const auto& member : members()) {
    if (fate_of(member) != Fate::failed) continue;
    const auto* seen = find(member.agent);
    const auto suspicion = [](const Seen& s) {
      return std::make_tuple(s.record.report.consequence, s.revision);
    };
    if (!first || suspicion(*seen) < suspicion(*first)) first = seen;
  }
  if (!first) return nullptr;
  if (first->record.report.consequence) {
    if (!consequence_since_) consequence_since_ = now;
    wake(*consequence_since_ + options_.cause_wait, now);
    if (now < *consequence_since_ + options_.cause_wait) return nullptr;
  }
  return &first->record.report;
}

bool Leader::is_interrupted() const {
  bool anyone_leaves = false;
  for (const auto& [id, seen] : agents_) {
    if (!seen.record.leaving) continue;
    anyone_leaves = true;
    if (seen.record.hosts_registry) return true;
  }
  if (fresh_ || !anyone_leaves) return false;
  const bool member_leaves =
      std::any_of(members().begin(), members().end(),
                  [&](const auto& member) { return fate_of(member) == Fate::leaving; });
  if (member_leaves && options_.min_agents == options_.max_agents) return true;
  return std::all_of(agents_.begin(), agents_.end(),
                     [](const auto& entry) { return entry.second.record.leaving; });
}

/// Who can be in the next generation: members that remain, then those that came first.
std::vector<std::string> Leader::candidates() const {
  if (agents_.size() < static_cast<size_t>(options_.min_agents)) return {};
  std::vector<std::string> wished;
  for (const auto& member : members()) wished.push_back(member.agent);
  const std::set<std::string> members(wished.begin(), wished.end());
  std::vector<std::pair<int64_t, std::string>> joiners;
  for (const auto& [id, seen] : agents_) {
    if (!members.count(id)) joiners.emplace_back(seen.record.joined, id);
  }
  std::sort(joiners.begin(), joiners.end());
  for (const auto& joiner : joiners) wished.push_back(joiner.second);
  std::vector<std::pair<std::string, std::optional<int>>> chosen;
  std::set<int> taken;
  for (const auto& id : wished) {
    const auto* seen = find(id);
    if (!seen || seen->record.leaving) continue;
    if (chosen.size() == static_cast<size_t>(options_.max_agents)) break;
    const auto& place = seen->record.node_rank;
    if (place && !taken.insert(*place).second) continue;  // Stands by for the one that has it.
    chosen.emplace_back(id, place);
  }
  return in_places(chosen);
}

std::optional<GenerationRecord> Leader::end(JobEnd::Kind kind, const Report* cause) const {
  GenerationRecord next = fresh_ ? successor({}) : *current_;
  if (!fresh_) next.earlier = perhaps_running();
  next.end.kind = kind;
  if (cause) {
    next.end.exit_code = cause->exit_code;
    next.end.text = cause->text;
  }
  return next;
}

std::optional<GenerationRecord> Leader::fail(const std::string& text, int exit_code) const {
  const Report cause{.exit_code = exit_code, .text = text};
  return end(JobEnd::Kind::failure, &cause);
}

GenerationRecord Leader::successor(const std::vector<std::string>& agents) const {
  GenerationRecord next;
  next.job = fresh_ ? options_.id : current_->job;
  next.number = current_->number + 1;
  int rank = 0;
  for (const auto& id : agents) {
    const auto& record = find(id)->record;
    next.members.push_back({id, record.nproc, record.life, rank});
    rank += record.nproc;
  }
  next.earlier = perhaps_running();
  if (fresh_) return next;
  next.restarts = current_->restarts;
  next.failures = current_->failures;
  return next;
}

/// Generations up to the current one that were started, and of which nobody has said that they run
/// no longer.
std::vector<EarlierGeneration> Leader::perhaps_running() const {
  auto found = current_->earlier;
  if (current_->has_store() && !fresh_) {
    found.push_back({current_->number, {}});
    for (const auto& member : members()) found.back().agents.push_back(member.agent);
  }
  std::erase_if(found, [&](const auto& earlier) { return idle_.count(earlier.number); });
  return found;
}

/// Whether no earlier generation can run while `next` does. Whoever is in both cannot run both, so
/// a common member keeps them apart. Where there is none, all members of the earlier one must have
/// been away for so long that they have stopped their workers.
bool Leader::is_safe(const GenerationRecord& next, Time now) {
  std::set<std::string> members;
  for (const auto& member : next.members) members.insert(member.agent);
  awaited_.clear();
  for (const auto& earlier : next.earlier) {
    const auto& agents = earlier.agents;
    if (std::none_of(agents.begin(), agents.end(), [&](const auto& a) { return members.count(a); }))
      awaited_.insert(agents.begin(), agents.end());
  }
  const bool alone = std::none_of(awaited_.begin(), awaited_.end(),
                                  [&](const auto& agent) { return find(agent); });
  if (awaited_.empty() || !alone) alone_since_.reset();
  if (awaited_.empty() || !alone || options_.embedded_registry) return awaited_.empty();
  if (!alone_since_) {
    alone_since_ = now;
    probing_ = false;
  }
  const Time until = *alone_since_ + options_.contact_limit + options_.contact_margin;
  wake(until, now);
  if (now < until) return false;
  if (!std::exchange(probing_, true)) ++probe_;
  const auto* own = find(options_.id);
  return own && own->record.probe == probe_;
}

/// The job cannot go on, and ends if that stays so for too long. `why` names what is missing.
std::optional<GenerationRecord> Leader::wait(const std::string& why, Time now) {
  if (std::exchange(waiting_for_, why) != why || !waiting_since_) waiting_since_ = now;
  const Time until = *waiting_since_ + options_.join_timeout;
  wake(until, now);
  if (now < until) return std::nullopt;
  return fail(why + " for " + seconds_text(options_.join_timeout));
}

std::optional<GenerationRecord> Leader::end_by_loss() {
  std::string text = "a host is lost:";
  for (const auto& member : members()) {
    if (fate_of(member) == Fate::gone) text += " " + member.agent;
  }
  return fail(text);
}

/// Ends a job of a fixed number of hosts of which two take themselves for the same one: nobody
/// would come in the place of the other. A host that was killed and is back at once is not one of
/// two: its lease of before gets the time to end.
std::optional<GenerationRecord> Leader::refuse_twins(Time now) {
  std::map<int, std::string> places;
  for (const auto& [id, seen] : agents_) {
    const auto& place = seen.record.node_rank;
    if (!place || seen.record.leaving || options_.min_agents != options_.max_agents) continue;
    const auto [first, is_only] = places.emplace(*place, id);
    if (is_only) continue;
    const Time until = counted_at_ + 2 * options_.keep_alive;
    wake(until, now);
    if (now < until) return std::nullopt;
    return fail(first->second + " and " + id + " both are host " + std::to_string(*place) +
                    "; give each its own number by --node-rank, from 0",
                kExitUsage);
  }
  return std::nullopt;
}

std::optional<GenerationRecord> Leader::regroup(std::optional<Time> patient_until, Time now) {
  bool change = members().empty(), gone = false;
  for (const auto& member : members()) {
    const auto fate = fate_of(member);
    gone = gone || fate == Fate::gone;
    change = change || gone || fate == Fate::needs_next || fate == Fate::leaving;
  }
  if (gone && patient_until && now < *patient_until) {
    wake(*patient_until, now);
    return std::nullopt;
  }
  if (members().empty()) {
    if (auto refusal = refuse_twins(now)) return refusal;
  }
  const auto agents = candidates();
  const bool grows = agents.size() > members().size() && done_.empty();
  if (!change && !grows) {
    waiting_since_.reset();
    return std::nullopt;
  }
  if (agents.size() < static_cast<size_t>(options_.min_agents)) {
    if (gone && options_.ends_with_a_host) return end_by_loss();
    if (!members().empty()) return successor({});
    return wait("fewer than the " + std::to_string(options_.min_agents) +
                    " hosts that the job needs at least were there",
                now);
  }
  if (agents.size() < static_cast<size_t>(options_.max_agents)) {
    wake(counted_at_ + options_.last_call, now);
    if (now < counted_at_ + options_.last_call) return std::nullopt;
  }
  auto next = successor(agents);
  if (!is_safe(next, now))
    return wait("workers of hosts that are out of reach may still have run", now);
  waiting_since_.reset();
  if (!awaited_.empty()) next.earlier.clear();
  return next;
}

std::optional<GenerationRecord> Leader::propose(std::shared_ptr<const GenerationRecord> current,
                                                bool fresh, std::optional<Time> patient_until,
                                                Time now) {
  deadline_.reset();
  if (!has_view_) return std::nullopt;
  if (!current) current = std::make_shared<const GenerationRecord>();
  if (current->number != current_->number) {
    alone_since_.reset();
    consequence_since_.reset();
    done_.clear();
  }
  current_ = std::move(current);
  fresh_ = fresh;
  note_ends();
  return fresh ? propose_first(now) : propose_next(patient_until, now);
}

std::optional<GenerationRecord> Leader::propose_first(Time now) {
  // Agents of the earlier job may still stop their workers.
  for (const auto& member : current_->members)
    if (find(member.agent)) return std::nullopt;
  if (is_interrupted()) return end(JobEnd::Kind::interrupted);
  return regroup({}, now);
}

std::optional<GenerationRecord> Leader::propose_next(std::optional<Time> patient_until, Time now) {
  const bool done =
      !members().empty() && std::all_of(members().begin(), members().end(),
                                        [&](const auto& m) { return fate_of(m) == Fate::done; });
  if (done) return end(JobEnd::Kind::success);
  const Report* cause = failure(now);
  if (cause && (!cause->can_retry || current_->restarts >= options_.max_restarts))
    return end(JobEnd::Kind::failure, cause);
  if (is_interrupted()) return end(JobEnd::Kind::interrupted);
  if (!cause) return regroup(patient_until, now);
  auto agents = candidates();
  const bool enough = agents.size() >= static_cast<size_t>(options_.min_agents);
  if (!enough || !is_safe(successor(agents), now)) agents.clear();
  auto next = successor(agents);
  ++next.restarts;
  next.failures.push_back(cause->text.substr(0, cause->text.find('\n')));
  return next;
}

}  // namespace lockstep::elastic
