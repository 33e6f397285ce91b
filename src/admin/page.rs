//! The ring on a page: one file with everything in it, which asks `/status` and draws what it says.

use axum::http::header;
use axum::response::{IntoResponse, Response};

/// The page.
const PAGE: &str = include_str!("page.html");

/// What the page may do: run its own script, use its own style, show the icon that it carries, and ask this sidecar.
/// The hashes are those of the two blocks; `tests/admin.rs` says what they must be when the page has changed.
const POLICY: &str = "default-src 'none'; \
    script-src 'sha256-m4Kc7dDo12nWgQr5VzEm0uzRgz8k+ZTVhIed4M+hHFs='; \
    style-src 'sha256-JrmH8Ct4DkT07JJ+cyVKwUC6tSa/70HOwKG343cLrTc='; \
    img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page, never from a cache: it belongs to the version that serves it.
pub(super) async fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CACHE_CONTROL, "no-store"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (headers, PAGE).into_response()
}
