#include "lockstep/data/download.h"

#include <httplib.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <future>
#include <mutex>
#include <thread>

#include "lockstep/base/file.h"
#include "lockstep/base/hash.h"
#include "lockstep/data/named_sets.h"
#include "tests/support/other_process.h"
#include "tests/support/test_files.h"
#include "tests/support/test_wait.h"

namespace lockstep {
namespace download_test {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using test_files::complaint;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

/// A server on a free port of the loopback interface, for the life of the object. Remembers the
/// "path range" of each request.
class LocalServer {
 public:
  explicit LocalServer(
      std::unique_ptr<httplib::Server> server = std::make_unique<httplib::Server>(),
      std::string scheme = "http")
      : server_(std::move(server)), scheme_(std::move(scheme)) {
    server_->set_pre_routing_handler([this](const httplib::Request& request, httplib::Response&) {
      const std::lock_guard lock(mutex_);
      requests_.push_back(request.path + " " + request.get_header_value("Range"));
      return httplib::Server::HandlerResponse::Unhandled;
    });
    port_ = server_->bind_to_any_port("127.0.0.1");
    EXPECT_GT(port_, 0);
  }
  ~LocalServer() {
    server_->stop();
    if (thread_.joinable()) thread_.join();
  }

  /// Begins to answer; handlers are to be there before.
  void start() {
    thread_ = std::thread([this] { server_->listen_after_bind(); });
    test_wait::wait_until([&] { return server_->is_running(); }, "the server to answer");
  }

  httplib::Server& handlers() { return *server_; }
  std::string url(const std::string& path) const {
    return scheme_ + "://127.0.0.1:" + std::to_string(port_) + path;
  }
  std::vector<std::string> requests() const {
    const std::lock_guard lock(mutex_);
    return requests_;
  }

 private:
  std::unique_ptr<httplib::Server> server_;
  std::string scheme_;
  int port_ = 0;
  mutable std::mutex mutex_;
  std::vector<std::string> requests_;
  std::thread thread_;
};

class Download : public testing::Test {
 protected:
  Download() {
    for (int i = 0; i < 300'000; ++i)
      content_ += static_cast<char>(static_cast<uint32_t>(i) * static_cast<uint32_t>(i) >> 7);
    options_.first_pause = 1ms;
  }

  void fetch(const std::vector<std::string>& urls) {
    download(urls, target(), md5_hex(content_), options_, "MIRROR");
  }
  std::string failure_of(const std::vector<std::string>& urls) {
    return complaint<DataError>([&] { fetch(urls); });
  }
  fs::path target() const { return folder_.path() / "x.gz"; }
  std::vector<std::string> entries() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_.path())) {
      names.push_back(entry.path().filename().string());
    }
    return names;
  }

  TemporaryDirectory folder_;
  LocalServer server_;
  std::string content_;
  DownloadOptions options_;
};

TEST_F(Download, PutsTheFileInPlaceAndNothingElse) {
  server_.handlers().Get("/x", [&](const auto&, auto& response) {
    response.set_content(content_, "application/octet-stream");
  });
  server_.start();
  fetch({server_.url("/x")});
  EXPECT_EQ(read_file(target()), content_);
  EXPECT_THAT(entries(), ElementsAre("x.gz"));
}

TEST_F(Download, TriesAgainWhereTheConnectionBroke) {
  int calls = 0;
  server_.handlers().Get("/x", [&](const auto&, auto& response) {
    const size_t cut = ++calls == 1 ? 100'000 : content_.size();
    response.set_content_provider(
        content_.size(), "application/octet-stream",
        [this, cut](size_t offset, size_t length, httplib::DataSink& sink) {
          if (offset >= cut) return false;
          return sink.write(content_.data() + offset, std::min(length, cut - offset));
        });
  });
  server_.start();
  fetch({server_.url("/x")});
  EXPECT_EQ(read_file(target()), content_);
  EXPECT_EQ(calls, 2);
}

TEST_F(Download, TriesAgainAfterServerErrors) {
  int calls = 0;
  server_.handlers().Get("/x", [&](const auto&, auto& response) {
    if (++calls <= 2) {
      response.status = calls == 1 ? 500 : 429;
      response.set_content("an error page, not the file", "text/plain");
    } else {
      response.set_content(content_, "application/octet-stream");
    }
  });
  server_.start();
  fetch({server_.url("/x")});
  EXPECT_EQ(read_file(target()), content_);
  EXPECT_EQ(calls, 3);
}

TEST_F(Download, GivesUpAfterTheLastTry) {
  options_.attempts = 3;
  server_.handlers().Get("/x", [&](const auto&, auto& response) { response.status = 503; });
  server_.start();
  EXPECT_THAT(failure_of({server_.url("/x")}),
              AllOf(HasSubstr("cannot download " + target().string()), HasSubstr(server_.url("/x")),
                    HasSubstr("503"), HasSubstr("(3 tries)"), HasSubstr("mirror")));
  EXPECT_EQ(server_.requests().size(), 3u);
  EXPECT_THAT(entries(), IsEmpty());
}

TEST_F(Download, GoesOnToTheNextMirror) {
  server_.handlers().Get("/good", [&](const auto&, auto& response) {
    response.set_content(content_, "application/octet-stream");
  });
  server_.handlers().Get("/wrong", [&](const auto&, auto& response) {
    response.set_content("another file", "application/octet-stream");
  });
  server_.start();
  fetch({server_.url("/absent"), server_.url("/wrong"), server_.url("/good")});
  EXPECT_EQ(read_file(target()), content_);
  EXPECT_THAT(server_.requests(), ElementsAre("/absent ", "/wrong ", "/good "));
}

TEST_F(Download, WrongContentIsRefusedAndNotKept) {
  server_.handlers().Get("/x", [&](const auto&, auto& response) {
    response.set_content("another file", "application/octet-stream");
  });
  server_.start();
  EXPECT_THAT(
      failure_of({server_.url("/x"), server_.url("/absent")}),
      AllOf(HasSubstr("expected " + md5_hex(content_)), HasSubstr("404"), HasSubstr("/absent")));
  EXPECT_THAT(entries(), IsEmpty());
}

TEST_F(Download, StalledTransferTimesOut) {
  options_.stall_timeout = 1s;
  options_.attempts = 1;
  std::promise<void> over;
  const std::shared_future<void> ended = over.get_future().share();
  server_.handlers().Get("/x", [this, ended](const auto&, httplib::Response& response) {
    response.set_content_provider(content_.size(), "application/octet-stream",
                                  [this, ended](size_t offset, size_t, httplib::DataSink& sink) {
                                    if (offset == 0) return sink.write(content_.data(), 1000);
                                    ended.wait();
                                    return false;
                                  });
  });
  server_.start();
  EXPECT_THAT(failure_of({server_.url("/x")}), HasSubstr("too slow"));
  EXPECT_THAT(entries(), IsEmpty());
  over.set_value();
}

TEST_F(Download, NobodyListens) {
  options_.attempts = 2;
  std::string address;
  {
    LocalServer gone;
    gone.start();
    address = gone.url("/x");
  }
  EXPECT_THAT(failure_of({address}), AllOf(HasSubstr(address), HasSubstr("onnect")));
  EXPECT_THAT(failure_of({"file:///etc/hostname"}), HasSubstr("rotocol"));
}

TEST_F(Download, UnwritableTargetIsNamed) {
  server_.start();
  const fs::path nowhere = folder_.path() / "nowhere" / "x";
  EXPECT_THAT(complaint<SystemError>(
                  [&] { download({server_.url("/x")}, nowhere, "", options_, "MIRROR"); }),
              HasSubstr("cannot write " + nowhere.string()));
}

/// A key and a certificate of its own making for 127.0.0.1, as PEM files.
void make_certificate(const fs::path& key_file, const fs::path& certificate_file) {
  EVP_PKEY* key = EVP_EC_gen("P-256");
  X509* certificate = X509_new();
  X509_set_version(certificate, 2);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate), 1);
  X509_gmtime_adj(X509_getm_notBefore(certificate), -3600);
  X509_gmtime_adj(X509_getm_notAfter(certificate), 3600);
  X509_set_pubkey(certificate, key);
  X509_NAME* name = X509_get_subject_name(certificate);
  X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>("127.0.0.1"), -1, -1, 0);
  X509_set_issuer_name(certificate, name);
  X509_EXTENSION* extension =
      X509V3_EXT_conf_nid(nullptr, nullptr, NID_subject_alt_name, "IP:127.0.0.1");
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
  X509_sign(certificate, key, EVP_sha256());
  FILE* file = std::fopen(key_file.c_str(), "w");
  PEM_write_PrivateKey(file, key, nullptr, nullptr, 0, nullptr, nullptr);
  std::fclose(file);
  file = std::fopen(certificate_file.c_str(), "w");
  PEM_write_X509(file, certificate);
  std::fclose(file);
  X509_free(certificate);
  EVP_PKEY_free(key);
}

TEST_F(Download, HttpsNeedsATrustedCertificate) {
  const TemporaryDirectory keys;
  const fs::path key = keys.path() / "key.pem";
  const fs::path certificate = keys.path() / "certificate.pem";
  make_certificate(key, certificate);
  LocalServer secure(std::make_unique<httplib::SSLServer>(certificate.c_str(), key.c_str()),
                     "https");
  secure.handlers().Get("/x", [&](const auto&, auto& response) {
    response.set_content(content_, "application/octet-stream");
  });
  secure.handlers().Get(
      "/to-http", [&](const auto&, auto& response) { response.set_redirect(server_.url("/x")); });
  secure.start();
  EXPECT_THAT(failure_of({secure.url("/x")}), HasSubstr("certificate"));
  options_.ca_file = certificate;
  EXPECT_THAT(failure_of({secure.url("/to-http")}), HasSubstr("rotocol")) << "no way back to http";
  fetch({secure.url("/x")});
  EXPECT_EQ(read_file(target()), content_);
}

/// A set of small files with right checksums, served by a local server.
class MnistDownload : public testing::Test {
 protected:
  MnistDownload() {
    source_.name = "mnist";
    source_.folders = {"mnist", "MNIST/raw"};
    source_.mirror_variable = "LOCKSTEP_MNIST_URL";
    source_.mirrors = {server_.url("/base/")};
    size_t i = 0;
    for (const auto& [name, content] : SmallFiles().named()) {
      const std::string packed = test_files::deflated(content);
      source_.files[i++] = {name, md5_hex(packed)};
      server_.handlers().Get("/base/" + name + ".gz", [packed](const auto&, auto& response) {
        response.set_content(packed, "application/gzip");
      });
    }
    options_.data_dir = folder_.path() / "data";
    options_.download = true;
    options_.transfer.first_pause = 1ms;
  }
  using SmallFiles = test_files::SmallMnist;

  TemporaryDirectory folder_;
  LocalServer server_;
  MnistLike source_;
  DatasetOptions options_;
};

TEST_F(MnistDownload, FetchesWhatIsMissing) {
  server_.start();
  EXPECT_EQ(load_mnist(source_, options_).train.size(), 6);
  EXPECT_EQ(server_.requests().size(), 4u);
  const auto files = fs::directory_iterator(options_.data_dir / "mnist");
  EXPECT_EQ(std::distance(files, fs::directory_iterator()), 4) << "and no lock or part is left";
  fs::remove(options_.data_dir / "mnist" / "t10k-labels-idx1-ubyte.gz");
  load_mnist(source_, options_);
  EXPECT_EQ(server_.requests().size(), 5u);
  options_.download = false;
  load_mnist(source_, options_);
  EXPECT_EQ(server_.requests().size(), 5u);
}

TEST_F(MnistDownload, OneOfSeveralRanksDownloads) {
  server_.start();
  {
    std::vector<std::jthread> ranks;
    for (int i = 0; i < 4; ++i) {
      ranks.emplace_back([&] { EXPECT_EQ(load_mnist(source_, options_).test.size(), 4); });
    }
  }
  EXPECT_EQ(server_.requests().size(), 4u);
}

TEST_F(MnistDownload, WrongChecksumNamesBoth) {
  source_.files[1].gzip_md5 = std::string(32, '0');
  server_.start();
  const std::string text = complaint<DataError>([&] { load_mnist(source_, options_); });
  EXPECT_THAT(text, AllOf(HasSubstr("train-labels-idx1-ubyte.gz"),
                          HasSubstr("the MD5 of the file is " +
                                    md5_hex(test_files::deflated(SmallFiles().train_labels))),
                          HasSubstr("expected " + std::string(32, '0'))));
}

TEST_F(MnistDownload, MirrorsOfTheUser) {
  source_.mirrors = {"http://127.0.0.1:1/"};
  server_.start();
  ::setenv("LOCKSTEP_MNIST_URL", server_.url("/base").c_str(), 1);
  load_mnist(source_, options_);
  ::unsetenv("LOCKSTEP_MNIST_URL");
  EXPECT_EQ(server_.requests().size(), 4u);
}

TEST_F(MnistDownload, AFailureNamesTheVariable) {
  source_.mirrors = {"http://127.0.0.1:1/"};
  EXPECT_THAT(complaint<DataError>([&] { load_mnist(source_, options_); }),
              HasSubstr("LOCKSTEP_MNIST_URL"));
}

TEST_F(MnistDownload, FolderThatCannotBeMade) {
  test_files::write(options_.data_dir, "a file where the folder should be");
  server_.start();
  EXPECT_THAT(complaint<SystemError>([&] { load_mnist(source_, options_); }),
              HasSubstr((options_.data_dir / "mnist").string()));
}

bool never() {
  return false;
}

TEST(FillFolder, OneAtATimeAndTheFileGoes) {
  const TemporaryDirectory folder;
  std::atomic<int> inside{0};
  std::atomic<int> turns{0};
  const auto fill = [&] {
    EXPECT_EQ(++inside, 1);
    std::this_thread::yield();
    --inside;
    ++turns;
  };
  const auto work = [&] {
    for (int i = 0; i < 20; ++i) fill_folder(folder.path(), never, fill, 60s);
  };
  {
    const std::jthread a(work);
    const std::jthread b(work);
    const std::jthread c(work);
  }
  EXPECT_EQ(turns, 60);
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(FillFolder, OthersWaitAndTheTimeOutNamesTheFolder) {
  const TemporaryDirectory folder;
  std::atomic<bool> filled{false};
  std::jthread waiter;
  const auto fill = [&] {
    try {
      fill_folder(
          folder.path(), never, [] { FAIL(); }, 100ms);
      FAIL() << "no time-out";
    } catch (const TimeoutError& error) {
      EXPECT_THAT(error.what(), HasSubstr(folder.path().string()));
    }
    waiter = std::jthread([&] {
      fill_folder(
          folder.path(), [&] { return filled.load(); }, [] { FAIL(); }, 60s);
    });
    filled = true;
  };
  fill_folder(
      folder.path(), [&] { return filled.load(); }, fill, 60s);
}

TEST(FillFolder, DeadOwnersLeaveNoLock) {
  const TemporaryDirectory folder;
  test_process::OtherProcess other([&](const auto& ready) {
    fill_folder(
        folder.path(), never,
        [&] {
          ready();
          ::pause();
        },
        60s);
  });
  other.kill();
  EXPECT_FALSE(fs::is_empty(folder.path())) << "the dead process's file is there";
  int fills = 0;
  fill_folder(
      folder.path(), never, [&] { ++fills; }, 60s);
  EXPECT_EQ(fills, 1);
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(FillFolder, UnwritableFolder) {
  EXPECT_THROW(fill_folder(
                   "/proc/self", never, [] {}, 60s),
               SystemError);
}

}  // namespace download_test
}  // namespace lockstep
