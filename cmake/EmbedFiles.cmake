# lockstep_embed_files(TARGET NAME file...): puts text files into the target, so that an installed
# binary needs none of them. `const std::map<std::string, std::string>& NAME()` of namespace
# lockstep::tool gives their contents by file name; declare it where it is used.
function(lockstep_embed_files target name)
  set(entries "")
  foreach(file IN LISTS ARGN)
    get_filename_component(file_name ${file} NAME)
    file(READ ${file} content)
    string(APPEND entries "      {\"${file_name}\", R\"LOCKSTEP(${content})LOCKSTEP\"},\n")
  endforeach()
  set(source ${CMAKE_CURRENT_BINARY_DIR}/${name}.cpp)
  file(
    GENERATE
    OUTPUT ${source}
    CONTENT
      "#include <map>\n#include <string>\n\nnamespace lockstep::tool {\n\nconst std::map<std::string, std::string>& ${name}() {\n  static const std::map<std::string, std::string> files = {\n${entries}  };\n  return files;\n}\n\n}  // namespace lockstep::tool\n"
  )
  set_property(
    DIRECTORY
    APPEND
    PROPERTY CMAKE_CONFIGURE_DEPENDS ${ARGN})
  target_sources(${target} PRIVATE ${source})
  set_source_files_properties(${source} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
endfunction()
