//! What is found out about a GPU, kept from one start to the next.

/// Keeps what is found out about a GPU, which kernels are the fastest for which sizes, and the compiled kernels in
/// `folder`, so that another start need not do it again. To be called before a GPU is used.
#[cfg(feature = "cube")]
pub fn keep_tuning(folder: &std::path::Path) {
    use cubecl::config::cache::CacheConfig;
    use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    config.environment.path = CacheConfig::Directory(folder.to_path_buf());
    config.compilation.cache = true;
    // It is set already where a GPU has been used before.
    CubeClRuntimeConfig::try_set(config);
}

/// Without GPUs there is nothing to keep.
#[cfg(not(feature = "cube"))]
pub fn keep_tuning(_: &std::path::Path) {}
