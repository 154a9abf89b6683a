#include "lockstep/data/safetensors.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>

#include "lockstep/base/file.h"
#include "tests/support/test_files.h"

namespace lockstep {
namespace safetensors_test {

namespace fs = std::filesystem;
using test_files::complaint;
using testing::AllOf;
using testing::AnyOf;
using testing::ElementsAre;
using testing::HasSubstr;
using ::testing::Pair;

/// A file with this header, padded by nothing, and these bytes behind it.
std::string with_header(const std::string& header, const std::string& data = {}) {
  std::string content;
  for (int i = 0; i < 8; ++i) content += static_cast<char>(header.size() >> (8 * i));
  return content + header + data;
}

class Safetensors : public testing::Test {
 protected:
  fs::path path() const { return folder_.path() / "x.safetensors"; }

  std::string complaint_about(const std::string& content) {
    test_files::write(path(), content);
    const std::string text = complaint<DataError>([&] { load_safetensors(path()); });
    EXPECT_THAT(text, HasSubstr(path().string() + ", byte "));
    return text;
  }
  size_t entries() const {
    return static_cast<size_t>(
        std::distance(fs::directory_iterator(folder_.path()), fs::directory_iterator()));
  }
  TemporaryDirectory folder_;
};

const at::Tensor& tensor_of(const SafetensorsFile& file, const std::string& name) {
  for (const auto& [known, tensor] : file.tensors) {
    if (known == name) return tensor;
  }
  throw Error("no tensor " + name);
}

TEST_F(Safetensors, RoundTripKeepsEveryDtype) {
  StateDict tensors;
  for (const at::ScalarType dtype :
       {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16,
        at::kFloat, at::kDouble, at::kUInt16, at::kUInt32, at::kUInt64, at::kFloat8_e4m3fn,
        at::kFloat8_e5m2, at::kComplexFloat}) {
    const at::Tensor tensor = at::arange(6).reshape({2, 3}).to(dtype);
    tensors.emplace_back(c10::toString(dtype), tensor);
  }
  save_safetensors(path(), tensors);
  const SafetensorsFile file = load_safetensors(path());
  ASSERT_EQ(file.tensors.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor& read = tensor_of(file, name);
    EXPECT_EQ(read.scalar_type(), tensor.scalar_type()) << name;
    ASSERT_EQ(read.sizes(), tensor.sizes()) << name;
    EXPECT_EQ(std::memcmp(read.const_data_ptr(), tensor.const_data_ptr(), tensor.nbytes()), 0)
        << name;
  }
}

TEST_F(Safetensors, RoundTripKeepsShapesMetadataAndNames) {
  const StateDict tensors{{"scalar", at::tensor(3.5f).reshape({})},
                          {"empty", at::zeros({0, 3})},
                          {"ключ \"quoted\"\n", at::ones({2})}};
  save_safetensors(path(), tensors, {{"format", "pt"}, {"step", "12"}});
  const SafetensorsFile file = load_safetensors(path());
  EXPECT_THAT(file.metadata, ElementsAre(Pair("format", "pt"), Pair("step", "12")));
  EXPECT_EQ(tensor_of(file, "scalar").dim(), 0);
  EXPECT_EQ(tensor_of(file, "scalar").item<float>(), 3.5f);
  EXPECT_EQ(tensor_of(file, "empty").sizes(), (std::vector<int64_t>{0, 3}));
  EXPECT_TRUE(tensor_of(file, "ключ \"quoted\"\n").equal(at::ones({2})));
}

TEST_F(Safetensors, NoTensorsAreAFileToo) {
  save_safetensors(path(), {});
  EXPECT_TRUE(load_safetensors(path()).tensors.empty());
}

TEST_F(Safetensors, WritesViewsAsWhatTheyShow) {
  const at::Tensor base = at::arange(12, at::kFloat).reshape({3, 4});
  const at::Tensor complex =
      at::complex(at::arange(3, at::kFloat), at::ones({3}, at::kFloat)).conj();
  save_safetensors(path(),
                   {{"transposed", base.t()}, {"column", base.select(1, 2)}, {"c", complex}});
  const SafetensorsFile file = load_safetensors(path());
  EXPECT_TRUE(tensor_of(file, "transposed").equal(base.t()));
  EXPECT_TRUE(tensor_of(file, "column").equal(base.select(1, 2)));
  EXPECT_TRUE(tensor_of(file, "c").equal(complex.resolve_conj()));
}

TEST_F(Safetensors, TensorsStartAligned) {
  save_safetensors(path(), {{"flags", at::ones({3}, at::kBool)},
                            {"a", at::ones({3})},
                            {"half", at::ones({1}, at::kHalf)},
                            {"wide", at::ones({1}, at::kDouble)}});
  const SafetensorsFile file = load_safetensors(path());
  std::vector<std::string> order;
  for (const auto& [name, tensor] : file.tensors) order.push_back(name);
  EXPECT_THAT(order, ElementsAre("wide", "a", "half", "flags"));
  const std::string content = read_file(path());
  EXPECT_EQ(static_cast<unsigned char>(content[0]) % 8, 0) << "the header's length";
}

TEST_F(Safetensors, TensorsHaveMemoryOfTheirOwn) {
  save_safetensors(path(), {{"a", at::zeros({2})}, {"b", at::zeros({2})}});
  const SafetensorsFile file = load_safetensors(path());
  tensor_of(file, "a").fill_(1);
  EXPECT_TRUE(tensor_of(file, "b").equal(at::zeros({2})));
  EXPECT_FALSE(tensor_of(file, "a").is_alias_of(tensor_of(file, "b")));
}

TEST_F(Safetensors, RefusesWhatTheFormatCannotHold) {
  const at::Tensor one = at::ones({1});
  EXPECT_THAT(complaint<Error>([&] {
                save_safetensors(path(), {{"a", one}, {"a", one}});
              }),
              HasSubstr("'a' is given twice"));
  EXPECT_THAT(complaint<Error>([&] {
                save_safetensors(path(), {{"__metadata__", one}});
              }),
              HasSubstr("reserves"));
  EXPECT_THAT(complaint<Error>([&] {
                save_safetensors(path(), {{"a", at::Tensor()}});
              }),
              HasSubstr("'a' is undefined"));
  EXPECT_THAT(complaint<Error>([&] {
                save_safetensors(path(), {{"a", one.to_sparse()}});
              }),
              HasSubstr("sparse"));
  EXPECT_THAT(complaint<Error>([&] {
                save_safetensors(path(), {{"a", one.to(at::kComplexDouble)}});
              }),
              HasSubstr("ComplexDouble"));
  EXPECT_THAT(complaint<Error>([&] {
                save_safetensors(path(), {{"\xff", one}});
              }),
              HasSubstr("UTF-8"));
  EXPECT_EQ(entries(), 0u) << "nothing is left behind";
}

TEST_F(Safetensors, FailureToWriteNamesTheFileAndLeavesNothing) {
  const fs::path nowhere = folder_.path() / "nowhere" / "x.safetensors";
  EXPECT_THAT(complaint<SystemError>([&] {
                save_safetensors(nowhere, {{"a", at::ones({1})}});
              }),
              HasSubstr(nowhere.string()));
}

TEST_F(Safetensors, ReadOnlyFolderKeepsTheOldFile) {
  if (::geteuid() == 0) GTEST_SKIP() << "root may write into read-only folders";
  save_safetensors(path(), {{"a", at::ones({1})}});
  fs::permissions(folder_.path(), fs::perms::owner_read | fs::perms::owner_exec);
  EXPECT_THAT(complaint<SystemError>([&] {
                save_safetensors(path(), {{"a", at::zeros({1})}});
              }),
              HasSubstr("Permission denied"));
  EXPECT_TRUE(tensor_of(load_safetensors(path()), "a").equal(at::ones({1})));
  fs::permissions(folder_.path(), fs::perms::owner_all);
}

// A limit on the size of files stands for a full disk: write() fails half-way in the same manner.
TEST_F(Safetensors, DiskThatTakesNoMoreKeepsTheOldFile) {
  save_safetensors(path(), {{"a", at::ones({1})}});
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const struct rlimit small { .rlim_cur = 4096, .rlim_max = before.rlim_max };
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string text = complaint<SystemError>([&] {
    save_safetensors(path(), {{"a", at::zeros({5000})}});
  });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(text, HasSubstr("cannot write " + path().string()));
  EXPECT_TRUE(tensor_of(load_safetensors(path()), "a").equal(at::ones({1})));
  EXPECT_EQ(entries(), 1u);
}

TEST_F(Safetensors, MissingFile) {
  EXPECT_THAT(complaint<SystemError>([&] { load_safetensors(path()); }),
              HasSubstr("cannot open " + path().string()));
}

TEST_F(Safetensors, EmptyAndForeignFiles) {
  EXPECT_THAT(complaint_about(""), HasSubstr("byte 0: the file is empty"));
  EXPECT_THAT(complaint_about("abc"), HasSubstr("expected 8 bytes of the header's length"));
  EXPECT_THAT(complaint_about("\x89PNG\r\n\x1a\n and so on"),
              AllOf(HasSubstr("byte 0: a header of "), HasSubstr("expected at least 2, at most")));
  EXPECT_THAT(complaint_about(test_files::deflated(with_header("{}"))), HasSubstr("a header of "));
  EXPECT_THAT(complaint_about(with_header("[1, 2]")),
              HasSubstr("byte 8: the header does not start"));
}

TEST_F(Safetensors, HeaderLargerThanTheFormatAllows) {
  test_files::write(path(), std::string("\x01\xe1\xf5\x05\0\0\0\0{", 9));
  ASSERT_EQ(::truncate(path().c_str(), 100'000'100), 0);  // a hole: takes no space
  EXPECT_THAT(complaint<DataError>([&] { load_safetensors(path()); }),
              HasSubstr("a header of 100000001 bytes; expected at least 2, at most 100000000"));
}

TEST_F(Safetensors, TruncatedAnywhere) {
  save_safetensors(path(), {{"a", at::arange(10, at::kFloat)}, {"b", at::ones({3}, at::kByte)}});
  const std::string whole = read_file(path());
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_THAT(complaint_about(whole.substr(0, size)),
                AnyOf(HasSubstr("expected"), HasSubstr("truncated")))
        << size;
  }
  EXPECT_THAT(complaint_about(whole.substr(0, whole.size() - 1)),
              HasSubstr("truncated: the header says " + std::to_string(whole.size()) +
                        " bytes, the file has " + std::to_string(whole.size() - 1)));
}

TEST_F(Safetensors, TrailingBytes) {
  save_safetensors(path(), {{"a", at::ones({1})}});
  const std::string whole = read_file(path());
  EXPECT_THAT(complaint_about(whole + "x"), AllOf(HasSubstr("byte " + std::to_string(whole.size())),
                                                  HasSubstr("bytes were added at its end")));
}

TEST_F(Safetensors, OffsetsThatDoNotFit) {
  const auto entry = [](const char* name, const char* shape, const char* offsets) {
    return std::string("\"") + name + R"(":{"dtype":"U8","shape":)" + shape +
           ",\"data_offsets\":" + offsets + "}";
  };
  const auto file = [](const std::string& entries, size_t bytes) {
    return with_header("{" + entries + "}", std::string(bytes, 'x'));
  };
  EXPECT_THAT(
      complaint_about(file(entry("a", "[4]", "[0,4]") + "," + entry("b", "[4]", "[2,6]"), 6)),
      AllOf(HasSubstr("'b' starts at data offset 2; expected 4"), HasSubstr("overlap")));
  EXPECT_THAT(
      complaint_about(file(entry("a", "[2]", "[0,2]") + "," + entry("b", "[2]", "[4,6]"), 6)),
      HasSubstr("there is a hole"));
  EXPECT_THAT(complaint_about(file(entry("a", "[9]", "[0,9]"), 4)), HasSubstr("truncated"));
  EXPECT_THAT(complaint_about(file(entry("a", "[3]", "[0,4]"), 4)),
              HasSubstr("'a' has data_offsets of 4 bytes; expected 3"));
  EXPECT_THAT(complaint_about(file(entry("a", "[4]", "[4,0]"), 4)), HasSubstr("no [begin, end]"));
  for (const char* offsets : {"[0]", "[-4,0]", "[0,4.0]", "[0,true]", "4"}) {
    EXPECT_THAT(complaint_about(file(entry("a", "[4]", offsets), 4)),
                HasSubstr("; expected {\"dtype\""))
        << offsets;
  }
  EXPECT_THAT(complaint_about(file(entry("a", "[4294967296,4294967296]", "[0,4]"), 4)),
              HasSubstr("a shape that is too large"));
  EXPECT_THAT(complaint_about(file(entry("a", "[0,9223372036854775807,9]", "[0,0]"), 0)),
              HasSubstr("a shape that is too large"));
  EXPECT_THAT(complaint_about(file(entry("a", "[1e3]", "[0,4]"), 4)),
              HasSubstr("; expected {\"dtype\""));
}

TEST_F(Safetensors, DamagedHeaders) {
  EXPECT_THAT(complaint_about(with_header("{\"a\":{\"dtype\":\"U8\",")),
              HasSubstr("the header is no valid JSON"));
  EXPECT_THAT(complaint_about(with_header("{\"a\":{\"dtype\":\"U8\",X}}")),
              HasSubstr("byte 27: the header is no valid JSON"));
  EXPECT_THAT(complaint_about(with_header("{\"a\":{\"shape\":[1e999]}}")),
              HasSubstr("the header is no valid JSON"));
  for (const std::string wrong : {"7", "[]", "{}", R"({"dtype":"U8"})", R"({"dtype":8})"}) {
    EXPECT_THAT(complaint_about(with_header("{\"a\":" + wrong + "}")),
                HasSubstr("'a' is " + wrong + "; expected {\"dtype\""));
  }
  EXPECT_THAT(
      complaint_about(with_header(R"({"a":{"dtype":"Q7","shape":[],"data_offsets":[0,1]}})")),
      AllOf(HasSubstr("'a' has the dtype 'Q7'; expected one of BOOL, U8"), HasSubstr("C64")));
  const std::string a = R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  EXPECT_THAT(complaint_about(with_header("{" + a + "," + a + "}", "x")),
              HasSubstr("names 'a' twice"));
  for (const std::string wrong : {R"({"a":1})", "[]"}) {
    EXPECT_THAT(complaint_about(with_header("{\"__metadata__\":" + wrong + "}")),
                HasSubstr("'__metadata__' is " + wrong + "; expected text by name"));
  }
  std::string deep = "{\"a\":";
  deep += std::string(100'000, '[');
  EXPECT_THAT(complaint_about(with_header(deep)), HasSubstr("JSON"));
}

TEST_F(Safetensors, BooleansThatAreNone) {
  EXPECT_THAT(complaint_about(with_header(
                  R"({"a":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}})", "\1\2")),
              HasSubstr("tensor 'a' has a byte other than 0 or 1 for a boolean"));
}

// The header's length may happen to look like the first bytes of gzip.
TEST_F(Safetensors, HeaderLengthThatLooksLikeGzip) {
  std::string header = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  header.resize(0x8b1f, ' ');
  test_files::write(path(), with_header(header, "x"));
  EXPECT_EQ(tensor_of(load_safetensors(path()), "a").item<int>(), 'x');
}

}  // namespace safetensors_test
}  // namespace lockstep
