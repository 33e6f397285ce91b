//! Serves the page that draws the ring: one file, which asks `/status` and loads nothing else.

use axum::http::header;
use axum::response::{IntoResponse, Response};

/// The page may run its own script, use its own style, show the icon that it carries, and ask this sidecar. The hashes are
/// those of the two blocks; if the page has changed, `tests/admin.rs` prints the new ones.
const POLICY: &str = "default-src 'none'; \
    script-src 'sha256-m4Kc7dDo12nWgQr5VzEm0uzRgz8k+ZTVhIed4M+hHFs='; \
    style-src 'sha256-JrmH8Ct4DkT07JJ+cyVKwUC6tSa/70HOwKG343cLrTc='; \
    img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Serves the page. No cache may keep it: it belongs to the version that serves it.
pub(super) async fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CACHE_CONTROL, "no-store"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (headers, include_str!("page.html")).into_response()
}
