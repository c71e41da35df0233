// SPDX-License-Identifier: Apache-2.0

// Command release makes, verifies and signs releases. Of one commit and version it always makes the
// same bytes, with the same Go and the same Debian packages, and needs no network once these and the
// modules are cached. Beside it are the tests of the binaries of `make build`: they must be static,
// small, and stamped with their version.
//
//	release make -version v0.1.0 -key FILE     what `make release` runs
//	release verify -public-key FILE dist       what `make verify` runs
//	release keygen FILE                        a key to sign with: FILE and FILE.pub
package main
