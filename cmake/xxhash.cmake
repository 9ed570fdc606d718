# xxHash is used as a header (XXH_INLINE_ALL), so that the module links to nothing for it. The system's
# copy is taken where there is one; otherwise the header comes out of the source distribution of
# the `xxhash` Python package, fetched by the same pip that installs the build requirements.
find_path(DFKV_XXHASH_INCLUDE xxhash.h)
if(NOT DFKV_XXHASH_INCLUDE)
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
  set(_dir ${CMAKE_BINARY_DIR}/xxhash)
  file(MAKE_DIRECTORY ${_dir})
  execute_process(
    COMMAND ${Python_EXECUTABLE} -m pip download -q --no-deps --no-binary xxhash
            --dest ${_dir} "xxhash>=3.4"
    RESULT_VARIABLE _result ERROR_VARIABLE _error)
  file(GLOB _archives ${_dir}/xxhash-*.tar.gz)
  if(_archives)
    list(GET _archives 0 _archive)
    file(ARCHIVE_EXTRACT INPUT ${_archive} DESTINATION ${_dir})
  endif()
  file(GLOB_RECURSE _headers ${_dir}/*/xxhash.h)
  if(NOT _headers)
    message(FATAL_ERROR "xxhash.h was not found on this system and could not be fetched (${_error}). "
      "Install it, for example with: apt-get install libxxhash-dev")
  endif()
  list(GET _headers 0 _header)
  get_filename_component(_include ${_header} DIRECTORY)
  set(DFKV_XXHASH_INCLUDE ${_include} CACHE PATH "Directory of xxhash.h" FORCE)
endif()
