#include <algorithm>

#include "tests/support/simulated_world.h"

// What goes wrong in a simulated world, and its end.
namespace lockstep::elastic {
namespace {

/// Between the faults' end and the time at which contact is back everywhere.
constexpr std::chrono::milliseconds kRecovery{5'000};

}  // namespace

std::optional<size_t> SimulatedWorld::pick(const std::function<bool(const Host&)>& fits) {
  std::vector<size_t> found;
  for (size_t i = 0; i < hosts_.size(); ++i) {
    if (hosts_[i].alive && !hosts_[i].finish && fits(hosts_[i])) found.push_back(i);
  }
  if (found.empty()) return std::nullopt;
  return found[random_.below(found.size())];
}

void SimulatedWorld::fault() {
  if (mended_) return;
  const auto host = pick([](const Host&) { return true; });
  switch (random_.below(12)) {
    case 0:
      if (host && !(hosts_[*host].options.hosts_registry && chance(0.7))) crash(*host);
      break;
    case 1:
    case 2:
      add_host();
      break;
    case 3:
      if (host) cut(*host, true, true);
      break;
    case 4:
      if (host) cut(*host, chance(0.5), chance(0.5));
      break;
    case 5:
      if (host) suspend_for_a_while(*host);
      break;
    case 6:
      stop_registry();
      break;
    case 7:
      loss_ = chance(0.5) ? 0.3 : 0;
      repeats_ = 0.3;
      slow_ = chance(0.5) ? 0.2 : 0;
      forgets_ = chance(0.3) ? 0.3 : 0;
      store_failures_ = chance(0.2) ? 0.2 : 0;
      break;
    case 8:
      if (host && chance(0.5)) leave(*host);
      break;
    case 9:
      for (size_t i = 0; i < hosts_.size(); ++i) {
        if (chance(0.6)) cut(i, true, true);
      }
      break;
    default:
      if (const auto victim = pick([](const Host& h) { return h.running != 0 && !h.stopping; }))
        chance(0.5) ? workers_end(*victim, false, false) : worker_fails(*victim);
  }
}

void SimulatedWorld::leave(size_t i) {
  trace(i, "is interrupted");
  hosts_[i].left = true;
  deliver(i, Leave{});
}

void SimulatedWorld::suspend_for_a_while(size_t i) {
  const bool clock_stands = chance(0.5);
  const Duration time = between(milliseconds(100), milliseconds(2'000));
  if (hosts_[i].lag + time > milliseconds(4'000)) return;
  suspend(i, clock_stands, time);
}

void SimulatedWorld::cut(size_t i, bool sends, bool receives) {
  trace(i, "is cut off");
  if (sends) hosts_[i].sends = false;
  if (receives) hosts_[i].receives = false;
  after(between(milliseconds(100), milliseconds(15'000)),
        [this, i] { hosts_[i].sends = hosts_[i].receives = true; });
}

/// All hosts of the generation at once, as behind a switch, while their workers run on.
void SimulatedWorld::split() {
  const auto& limits = plan_.options;
  const auto most = limits.contact_limit + limits.contact_margin + 2 * limits.keep_alive;
  const Duration together = between(milliseconds(1'000), most);
  trace(0, "the generation is cut off");
  for (const auto& member : rules_.record().members) {
    const size_t i = index_.at(member.agent);
    hosts_[i].sends = hosts_[i].receives = false;
    after(together + between(milliseconds(0), milliseconds(500)),
          [this, i] { hosts_[i].sends = hosts_[i].receives = true; });
  }
  if (!chance(0.5)) return;
  after(together, [this] { slow_ = 0.3; });
}

void SimulatedWorld::stop_registry() {
  if (!registry_up_ || plan_.options.embedded_registry) return;
  trace(0, "the registry is down");
  registry_up_ = false;
  after(between(milliseconds(100), milliseconds(12'000)), [this] { start_registry(); });
}

void SimulatedWorld::start_registry() {
  if (registry_gone_ || registry_up_) return;
  trace(0, "the registry is up");
  registry_up_ = true;
  if (chance(0.5)) registry_.prolong(now_ + plan_.options.keep_alive);
}

void SimulatedWorld::mend() {
  trace(0, "all is mended");
  mended_ = true;
  loss_ = repeats_ = slow_ = forgets_ = 0;
  for (auto& host : hosts_) host.sends = host.receives = true;
  start_registry();
  after(kRecovery, [this] { expect_success(); });
}

/// Whether enough hosts are there to bring the job to its end.
void SimulatedWorld::expect_success() {
  const auto limits = plan_.options;
  int there = 0;
  for (const auto& host : hosts_) {
    const bool stays = host.alive && !host.finish && !host.left;
    const bool has_place = !host.options.node_rank || *host.options.node_rank < limits.max_agents;
    if (stays && has_place) ++there;
  }
  const bool undecided = !rules_.record().ended() && !registry_gone_;
  const auto& earlier = rules_.record().earlier;
  const bool blocked =
      limits.embedded_registry && std::any_of(earlier.begin(), earlier.end(), [&](const auto& one) {
        return std::none_of(one.agents.begin(), one.agents.end(), [&](const std::string& id) {
          const auto& host = hosts_[index_.at(id)];
          return host.alive && !host.finish;
        });
      });
  success_expected_ = undecided && !blocked && there >= limits.min_agents;
}

}  // namespace lockstep::elastic
