#include "lockstep/elastic/agent.h"

#include <algorithm>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"

namespace lockstep::elastic {

constexpr std::chrono::seconds kSilence{3};

std::vector<Action> Agent::start(Time now) {
  started_ = now_ = now;
  actions_.push_back(Watch{kGenerationKey});
  actions_.push_back(Watch{kLeaderKey});
  reconcile();
  return std::exchange(actions_, {});
}

std::vector<Action> Agent::take(const Event& event, Time now) {
  now_ = now;
  if (finished_) return {};
  std::visit([this](const auto& e) { on(e); }, event);
  reconcile();
  return std::exchange(actions_, {});
}

// ---- What comes from the registry

void Agent::on(const Changed& changed) {
  if (changed.prefix == kAgentsPrefix) {
    if (view_) view_->take(changed, now_);
    return;
  }
  const bool is_leader = changed.prefix == kLeaderKey;
  Slot& slot = is_leader ? leader_ : generation_;
  if (!is_leader) {
    if (changed.whole && changed.revision < watched_revision_ && !job_.empty())
      return lose_job("the registry was started anew and no longer has the job");
    watched_revision_ = changed.revision;
  }
  const auto written = std::find_if(changed.written.begin(), changed.written.end(),
                                    [&](const auto& entry) { return entry.key == slot.key; });
  const bool erased =
      std::find(changed.erased.begin(), changed.erased.end(), slot.key) != changed.erased.end();
  if (written != changed.written.end()) {
    learn(slot, true, written->value, written->revision);
  } else if (changed.whole || erased) {
    learn(slot, false, {}, changed.revision);
  }
  if (is_leader) {
    knows_leader_ = true;
  } else if (!knows_generation_) {
    knows_generation_ = true;
    joined_ = changed.revision;
  }
}

void Agent::learn(Slot& slot, bool present, const std::string& value, int64_t revision) {
  if (revision < slot.revision) return;
  const bool same = present == slot.present && revision == slot.revision;
  slot.present = present;
  slot.revision = revision;
  joined_ = std::max(joined_, confirmed_ ? 0 : revision);
  if (&slot != &generation_) {
    slot.value = value;
  } else if (!same) {
    take_generation(value);
  }
}

void Agent::on(const Answered& answered) {
  for (Slot* slot : {&own_, &leader_, &generation_}) {
    if (slot->request != answered.request) continue;
    slot->request.reset();
    take_answer(*slot, answered);
  }
}

void Agent::take_answer(Slot& slot, const Answered& answered) {
  using Outcome = Answered::Outcome;
  const bool bound = &slot != &generation_;
  const bool of_this_life = !bound || (leased_ && slot.life == life_);
  if (answered.outcome == Outcome::failed || !of_this_life) return;
  if (answered.outcome == Outcome::lease_gone) return lose_lease();
  if (answered.entry) {
    learn(slot, true, answered.entry->value, answered.entry->revision);
  } else {
    learn(slot, false, {}, answered.revision);
  }
  if (&slot == &own_) take_own();
}

/// Our record as it lies there.
void Agent::take_own() {
  const bool first = !confirmed_;
  confirmed_.reset();
  if (!own_.present || own_.value != encode(written_)) return;
  confirmed_ = written_;
  contact_ = std::max(contact_.value_or(own_.sent), own_.sent);
  if (first && life_ > 0) patient_until_ = now_ + options_.keep_alive;
}

void Agent::on(const LeaseGranted&) {
  granting_ = false;
  leased_ = true;
}

void Agent::on(const LeaseLost&) {
  granting_ = false;
  if (leased_) lose_lease();
}

void Agent::lose_lease() {
  leased_ = false;
  ++life_;
  confirmed_.reset();
  own_.present = false;
  if (report_.generation < running_)
    report_ = {.generation = running_, .state = Report::State::running};
}

void Agent::on(const LeaseKept& kept) {
  if (leased_ && confirmed_) contact_ = std::max(*contact_, kept.sent);
}

void Agent::take_generation(const std::string& value) {
  if (!generation_.present) {
    there_.reset();
    if (!job_.empty()) lose_job("the job's record is gone from the registry");
    return;
  }
  try {
    there_ = std::make_shared<const GenerationRecord>(decode_generation(value));
  } catch (const DataError& error) {
    return lose_job(error.what());
  }
  // An embedded registry lives and ends with one job.
  const bool is_first = !knows_generation_ && !options_.embedded_registry;
  if (is_first && there_->ended()) foreign_job_ = there_->job;
  if (there_->job == foreign_job_) return;
  if (job_.empty()) job_ = there_->job;
  if (job_ != there_->job) return lose_job("the job has ended, and another uses its run id");
  const auto before = std::exchange(record_, there_);
  if (before && before->number != record_->number) tell_change(*before);
  if (record_->ended()) take_end(record_->end);
}

void Agent::tell_change(const GenerationRecord& before) {
  const size_t hosts = record_->members.size();
  if (record_->restarts > before.restarts)
    say(record_->failures.back() + "; the job goes on (restart " +
        std::to_string(record_->restarts) + " of " + std::to_string(options_.max_restarts) + ")");
  if (hosts == 0) {
    say("fewer than " + counted(options_.min_agents, "host") + " are there; waiting up to " +
        seconds_text(options_.join_timeout) + " for others");
  } else if (hosts != before.members.size()) {
    say("the job goes on, on " + counted(static_cast<int64_t>(hosts), "host"));
  }
}

void Agent::take_end(const JobEnd& end) {
  if (outcome_) return;
  using Kind = Finish::Kind;
  const bool failed = end.kind == JobEnd::Kind::failure;
  const Kind well = end.kind == JobEnd::Kind::success ? Kind::success : Kind::interrupted;
  outcome_ =
      Finish{.kind = failed ? Kind::failure : well, .exit_code = end.exit_code, .text = end.text};
  if (!failed) return;
  for (size_t i = 0; i < record_->failures.size(); ++i)
    outcome_->text += "\n  before, attempt " + std::to_string(i) + ": " + record_->failures[i];
}

void Agent::lose_job(const std::string& why) {
  if (!outcome_)
    outcome_ = Finish{.kind = Finish::Kind::lost, .exit_code = kExitFailure, .text = why};
}

// ---- What comes from this host

void Agent::on(const WorkersEnded& ended) {
  if (ended.generation != running_) return;
  report_end(ended.end);
  if (ended.end.others_live) return;
  running_ = 0;
  stopping_ = false;
}

/// Of the first failure, where others followed.
void Agent::report_end(const launch::HostEnd& end) {
  using State = Report::State;
  const bool is_known = report_.generation > running_ ||
                        (report_.generation == running_ && report_.state == State::failed);
  if (is_known) return;
  report_ = {.generation = running_, .state = end.succeeded ? State::done : State::failed};
  if (stopping_) {
    report_.state = State::stopped;
  } else if (!end.succeeded) {
    report_.exit_code = end.exit_code;
    report_.text = end.text;
    report_.can_retry = end.can_retry;
    report_.consequence = end.consequence;
  }
}

void Agent::on(const StoreOpened& opened) {
  if (opened.generation != store_for_) return;
  if (opened.error.empty()) {
    store_ = opened;
  } else if (report_.generation < store_for_) {
    report_ = {.generation = store_for_,
               .state = Report::State::failed,
               .exit_code = kExitFailure,
               .text = opened.error};
  }
}

// ---- What to do

void Agent::reconcile() {
  deadline_.reset();
  check_contact();
  follow();
  lead();
  write_own();
  say_good_bye();
  conclude();
  tell_wait();
}

/// Who sees nothing for long shall know what for.
void Agent::tell_wait() {
  const Time at = started_ + kSilence;
  if (told_wait_ || running_ != 0 || report_.generation != 0 || outcome_) return;
  wake(at);
  if (now_ < at) return;
  told_wait_ = true;
  const std::string unanswered = "no answer yet from " + options_.registry +
                                 ": is it started, and do firewalls let its port through?";
  say("waiting for " + counted(options_.min_agents, "host") + " to meet, for " +
      seconds_text(options_.join_timeout) + " at most; " +
      (knows_generation_ ? view_ ? view_->missing() : "others have not come" : unanswered));
}

void Agent::wake(Time at) {
  if (at > now_ && (!deadline_ || at < *deadline_)) deadline_ = at;
}

bool Agent::in_contact() const {
  return options_.embedded_registry || (contact_ && now_ < *contact_ + options_.contact_limit);
}

void Agent::check_contact() {
  if (outcome_) return;
  const Time limit =
      contact_ ? *contact_ + options_.contact_limit : started_ + options_.join_timeout;
  wake(limit);
  if (now_ >= limit) {
    lose_contact();
  } else {
    told_lost_contact_ = false;
  }
}

void Agent::lose_contact() {
  const std::string lost = "no contact to " + options_.registry + " for " +
                           seconds_text(contact_ ? options_.contact_limit : options_.join_timeout);
  if (!std::exchange(told_lost_contact_, true) && running_ != 0)
    say(lost + (options_.embedded_registry
                    ? "; the workers go on until they end"
                    : "; stopping the workers, as others may go on without them"));
  if (running_ != 0) {
    if (!options_.embedded_registry) stop(false);
    return;
  }
  if (contact_ && !options_.embedded_registry) {
    const Time until = *contact_ + options_.join_timeout;
    wake(until);
    if (now_ < until) return;
  }
  using State = Report::State;
  const bool ended_here = options_.embedded_registry && record_ &&
                          report_.generation == record_->number && record_->has_store();
  if (ended_here && report_.state == State::done) {
    outcome_ = Finish{Finish::Kind::success};
  } else if (ended_here && report_.state == State::failed) {
    outcome_ =
        Finish{.kind = Finish::Kind::failure, .exit_code = report_.exit_code, .text = report_.text};
  } else {
    lose_job(lost);
  }
}

void Agent::stop(bool interrupted) {
  const bool hurries = stopping_ && gently_ && !interrupted;
  if (stopping_ && !hurries) return;
  stopping_ = true;
  gently_ = interrupted;
  actions_.emplace_back(std::in_place_type<StopWorkers>, interrupted);
}

void Agent::follow() {
  if (running_ != 0) {
    const bool interrupted = leaving_ || (outcome_ && outcome_->kind == Finish::Kind::interrupted);
    const bool is_ours = std::any_of(
        record_->members.begin(), record_->members.end(),
        [&](const auto& member) { return member.agent == options_.id && member.life == life_; });
    if (interrupted || outcome_ || (running_ != record_->number && !is_ours)) stop(interrupted);
    if (stopping_ || running_ == record_->number) return;
  }
  if (outcome_ || !record_) return;
  if (running_ == 0) report_unstarted();
  const auto index = record_->index_of(options_.id);
  if (index && report_.generation < record_->number) begin(*index);
}

/// Of generations that have us as a member, and whose workers we never started and never will.
void Agent::report_unstarted() {
  const auto report = [&](int64_t number) {
    if (report_.generation < number)
      report_ = {.generation = number, .state = Report::State::stopped};
  };
  for (const auto& earlier : record_->earlier)
    if (earlier.has(options_.id)) report(earlier.number);
  const auto index = record_->index_of(options_.id);
  if (index && (leaving_ || record_->members[*index].life != life_)) report(record_->number);
}

/// The store first, if that is ours to open, then the workers.
void Agent::begin(size_t index) {
  const int64_t number = record_->number;
  if (record_->has_store()) {
    if (!in_contact()) return;
    // No worker takes part in an earlier one any more.
    if (running_ != 0) report_ = {.generation = number - 1, .state = Report::State::stopped};
    running_ = number;
    actions_.push_back(StartWorkers{record_, index});
    return;
  }
  if (index != 0) return;
  if (store_for_ != number) {
    store_for_ = number;
    store_.reset();
    actions_.push_back(OpenStore{number});
  } else if (store_ && !generation_.request) {
    auto next = *record_;
    next.store_address = store_->address;
    next.store_port = store_->port;
    if (running_ == 0) clear_own(next);
    write(generation_, encode(next), false);
  }
}

/// Takes out the generations that have us as a member, for we run none of them. False: no such one.
bool Agent::clear_own(GenerationRecord& record) const {
  return std::erase_if(record.earlier,
                       [&](const auto& earlier) { return earlier.has(options_.id); }) > 0;
}

std::string Agent::token() const {
  return options_.id + "/" + std::to_string(life_);
}

bool Agent::leads() const {
  return leased_ && leader_.present && leader_.value == token();
}

void Agent::lead() {
  const bool lingers = options_.hosts_registry && outcome_;
  const bool watches = leads() || lingers;
  if (watches && !view_) {
    view_.emplace(options_);
    actions_.push_back(Watch{kAgentsPrefix});
  } else if (!watches && view_) {
    view_.reset();
    actions_.push_back(Unwatch{kAgentsPrefix});
  }
  if (!leads() || outcome_ || generation_.request || !knows_generation_) return;
  const bool fresh = !there_ || there_->job == foreign_job_;
  const auto next = view_->propose(there_, fresh, patient_until_, now_);
  if (next) write(generation_, encode(*next), false);
  if (view_->deadline()) wake(*view_->deadline());
}

AgentRecord Agent::own_record() const {
  AgentRecord record;
  record.nproc = options_.nproc;
  record.node_rank = options_.node_rank;
  record.hosts_registry = options_.hosts_registry;
  record.life = life_;
  record.joined = confirmed_ ? confirmed_->joined : joined_;
  record.leaving = leaving_;
  record.probe = view_ ? view_->probe() : 0;
  record.report = report_;
  return record;
}

void Agent::write(Slot& slot, std::string value, bool with_lease) {
  slot.request = ++requests_;
  slot.sent = now_;
  slot.life = life_;
  actions_.push_back(CompareAndSet{*slot.request, slot.key, std::move(value),
                                   slot.present ? slot.revision : 0, with_lease});
}

void Agent::write_own() {
  if (!leased_) {
    if (!std::exchange(granting_, true)) actions_.push_back(GrantLease{});
    return;
  }
  if (!knows_generation_) return;
  const auto wanted = own_record();
  if (!own_.request && confirmed_ != wanted) {
    written_ = wanted;
    write(own_, encode(wanted), true);
  }
  const bool is_free = knows_leader_ && !leader_.present && !leader_.request;
  if (confirmed_ && is_free && !leaving_ && !outcome_) write(leader_, token(), true);
}

/// An agent that the user has interrupted goes when the job goes on without it.
void Agent::say_good_bye() {
  if (!leaving_ || running_ != 0 || outcome_) return;
  if (!left_at_) left_at_ = now_;
  const Time until = *left_at_ + 2 * options_.keep_alive;
  wake(until);
  const bool needed =
      options_.hosts_registry || (record_ && record_->index_of(options_.id).has_value());
  const bool told = job_.empty() || confirmed_ == own_record();
  if ((!needed && told) || now_ >= until) outcome_ = Finish{Finish::Kind::interrupted};
}

/// Whether something is still to be done for others.
bool Agent::holds_on() {
  if (outcome_->kind == Finish::Kind::lost) return false;
  if (!concluded_at_) concluded_at_ = now_;
  const Time tell_until = *concluded_at_ + 2 * options_.keep_alive;
  if (now_ < tell_until && there_ && there_ == record_ && record_->ended()) {
    auto next = *record_;
    if (clear_own(next)) {
      wake(tell_until);
      if (!generation_.request) write(generation_, encode(next), false);
      return true;
    }
  }
  const Time serve_until = *concluded_at_ + options_.contact_limit;
  if (!options_.hosts_registry || now_ >= serve_until) return false;
  wake(serve_until);
  if (!view_) lead();
  return !view_->is_alone(options_.id);
}

void Agent::conclude() {
  if (!outcome_ || running_ != 0 || holds_on()) return;
  if (leased_) actions_.push_back(LetGoLease{});
  actions_.push_back(*outcome_);
  finished_ = true;
  deadline_.reset();
}

}  // namespace lockstep::elastic
