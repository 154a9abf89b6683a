#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <httplib.h>

#include <limits>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/loggers/logger.h"

namespace lockstep {
namespace mlflow_test {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// It takes what MLflow 3.17 takes, and refuses all of a request for one item that it does not.
class MlflowServer : public testing::Test {
 protected:
  MlflowServer() {
    server_.Post("/api/2.0/mlflow/.*",
                 [this](const httplib::Request& request, httplib::Response& response) {
                   const std::lock_guard lock(mutex_);
                   const json body = json::parse(request.body);
                   json answer = json::object();
                   if (request.path.ends_with("experiments/search")) {
                     answer["experiments"] = json::array({{{"experiment_id", "7"}}});
                   } else if (request.path.ends_with("runs/create")) {
                     answer["run"]["info"]["run_id"] = "abc";
                   } else if (request.path.ends_with("runs/update")) {
                     status_ = body.at("status");
                   } else if (request.path.ends_with("runs/log-batch")) {
                     ++requests_;
                     for (const char* kind : {"metrics", "params"})
                       for (const json& item : body.value(kind, json::array()))
                         if (!takes(item)) response.status = 400;
                     if (response.status == 400)
                       answer["message"] = "INVALID_PARAMETER_VALUE";
                     else
                       take(body);
                   }
                   response.set_content(answer.dump(), "application/json");
                 });
    server_.set_keep_alive_timeout(1);  // `stop` waits for it.
    port_ = server_.bind_to_any_port("127.0.0.1");
    thread_ = std::thread([this] { server_.listen_after_bind(); });
  }
  ~MlflowServer() override { end(); }

  void end() {
    server_.stop();
    if (thread_.joinable()) thread_.join();
  }
  std::shared_ptr<Logger> logger() {
    return mlflow_logger({.tracking_uri = "http://127.0.0.1:" + std::to_string(port_)});
  }

  std::map<std::string, std::vector<json>> metrics_;
  std::map<std::string, std::string> params_;
  std::string status_;
  int requests_ = 0;

 private:
  static bool takes(const json& item) {
    static const std::regex name("[\\w./ :-]{1,250}");
    const json& value = item.at("value");
    const bool is_value =
        value.is_number() || (value.is_string() && !value.get_ref<const std::string&>().empty());
    return is_value && std::regex_match(item.at("key").get<std::string>(), name);
  }
  void take(const json& body) {
    for (const json& one : body.value("metrics", json::array()))
      metrics_[one.at("key")].push_back(one.at("value"));
    for (const json& one : body.value("params", json::array()))
      params_[one.at("key")] = one.at("value");
  }

  httplib::Server server_;
  std::thread thread_;
  std::mutex mutex_;
  int port_ = 0;
};

TEST_F(MlflowServer, GetsInfinityInTheWordsThatItTakes) {
  const auto run = logger();
  for (int step = 1; step <= 3; ++step) {
    run->log(step, {{"loss", step}, {"perplexity", step == 2 ? kInfinity : 2}, {"x", -kInfinity}},
             "train");
    run->flush();
  }
  run->close();
  EXPECT_THAT(metrics_["train/loss"], ElementsAre(1, 2, 3));
  EXPECT_THAT(metrics_["train/perplexity"], ElementsAre(2, "Infinity", 2));
  EXPECT_THAT(metrics_["train/x"], ElementsAre("-Infinity", "-Infinity", "-Infinity"));
  EXPECT_EQ(status_, "FINISHED");
}

TEST_F(MlflowServer, LosesOnlyTheNamesThatItRefuses) {
  testing::internal::CaptureStderr();
  const auto run = logger();
  run->log_hyperparameters({{"lr", "0.1"}, {"a@b", "1"}, {"model", "mlp"}});
  for (int step = 1; step <= 3; ++step) {
    run->log(step, {{"loss", step}, {"acc@5", 0.5}, {"lr", 1}, {std::string(251, 'x'), 1}});
    run->flush();
  }
  const int requests = requests_;
  run->log(4, {{"loss", 4}, {"acc@5", 0.5}});
  run->flush();
  EXPECT_EQ(requests_, requests + 1) << "what is refused is not asked again";
  run->close();
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(metrics_["loss"], ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(metrics_["lr"], ElementsAre(1, 1, 1));
  EXPECT_EQ(metrics_.size(), 2);
  EXPECT_THAT(params_, ElementsAre(testing::Pair("lr", "0.1"), testing::Pair("model", "mlp")));
  EXPECT_EQ(status_, "FINISHED");
  for (const char* name : {"'acc@5'", "'a@b'"}) {
    EXPECT_THAT(said, HasSubstr(name));
    EXPECT_EQ(said.find(name), said.rfind(name)) << "it is told once";
  }
}

TEST_F(MlflowServer, ThatIsAwayAtTheEndHasLostACountedNumber) {
  testing::internal::CaptureStderr();
  const auto run = logger();
  run->begin();
  end();
  run->log(1, {{"loss", 1}, {"lr", 1}, {"accuracy", 1}});
  run->close();
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("3 values"));
}

}  // namespace mlflow_test
}  // namespace lockstep
