#include "lockstep/elastic/job_record.h"

#include <gtest/gtest.h>

#include "lockstep/base/error.h"

namespace lockstep::elastic {
namespace {

TEST(ElasticRecords, AgentsComeBackFromJson) {
  AgentRecord record;
  EXPECT_EQ(decode_agent(encode(record)), record);
  record = {8, 3, true, 2, 17, true, 4, {}};
  record.report = {5, Report::State::failed, 7, "rank 3 \"failed\"\n", false, true};
  EXPECT_EQ(decode_agent(encode(record)), record);
}

TEST(ElasticRecords, GenerationsComeBackFromJson) {
  GenerationRecord record;
  EXPECT_EQ(decode_generation(encode(record)), record);
  record.job = "a1";
  record.number = 12;
  record.members = {{"a1", 8, 0, 0}, {"b2", 4, 3, 8}};
  record.store_address = "::1";
  record.store_port = 65'535;
  record.restarts = 1;
  record.failures = {"rank 1 was killed"};
  record.earlier = {{11, {"a1", "c3"}}};
  record.end = {JobEnd::Kind::failure, 9, "it failed"};
  EXPECT_EQ(decode_generation(encode(record)), record);
  EXPECT_EQ(record.world_size(), 12);
  EXPECT_EQ(record.index_of("b2"), 1u);
  EXPECT_FALSE(record.index_of("c3"));
}

TEST(ElasticRecords, WhatIsNoRecordIsRefused) {
  for (const char* text : {"", "{", "[]", "7", "{}", R"({"job":"a","number":1,"members":[["a"]]})",
                           R"({"job":"a","number":1,"members":[["a",0,0]]})",
                           R"({"job":"a","number":"1","members":[]})",
                           R"({"job":"a","number":1,"members":[],"end":{"kind":"odd"}})"})
    EXPECT_THROW(decode_generation(text), DataError) << text;
  EXPECT_THROW(decode_agent(R"({"host":"a"})"), DataError);
}

/// A worker's last words may be no UTF-8.
TEST(ElasticRecords, AnyTextCanBeWritten) {
  AgentRecord record;
  record.report.text = "\xff broken";
  EXPECT_NO_THROW(decode_agent(encode(record)));
}

}  // namespace
}  // namespace lockstep::elastic
