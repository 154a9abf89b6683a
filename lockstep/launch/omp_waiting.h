#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>

namespace lockstep::launch {

/// How the threads of LibTorch's OpenMP wait for each other, as an environment variable and its
/// value. GNU's OpenMP, which LibTorch is built with, spins up to 14 ms by default: on a machine
/// with other work each barrier then waits for a thread that the others keep from running. Threads
/// that sleep at once cost up to 1.6 times a small step on a quiet machine. So they spin 0.5 ms, or
/// 50 us where half of the processors or more have other work when this process first asks. OpenMP
/// reads the variable when it is loaded. Thread-safe; the first call takes a millisecond.
///
/// None where the user has chosen: OMP_WAIT_POLICY, GOMP_SPINCOUNT or KMP_BLOCKTIME is set.
std::optional<std::pair<std::string, std::string>> omp_waiting();

/// Of a line of /proc/loadavg: how many threads run or want to, without the one that reads it. 0
/// for what is no such line.
int others_running(const std::string& loadavg);

/// The value of GOMP_SPINCOUNT, turns of the loop that waits, beside `others` running threads.
const char* omp_spins(int others, int processors);

/// Sets it in this process. For programs that load LibTorch afterwards.
void choose_omp_waiting();

/// For a process that has loaded LibTorch already, as a program that no launcher of ours started:
/// makes threads spin some 50 us before they sleep, where `omp_waiting` would choose that. GNU's
/// OpenMP does so while it has more threads than processors. So the first call that finds the
/// machine busy starts one thread and as many more as there are processors. They sleep until the
/// process ends. Thread-safe. Returns whether they are there. False on a quiet machine, where the
/// user has chosen, and with another OpenMP.
bool shorten_omp_waiting();

/// Takes our own choice, which this process may have made, out of the environment of a program to
/// be started: an empty value unsets. For programs that we compare ourselves with.
void forget_omp_waiting(std::map<std::string, std::string>& environment);

/// For people: how they wait in this process and who has chosen so.
std::string omp_waiting_text();

}  // namespace lockstep::launch
