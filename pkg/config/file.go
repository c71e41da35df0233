// SPDX-License-Identifier: Apache-2.0

package config

// Default directories.
const (
	DefaultDataDir    = "/var/lib/cni/ip-masq"
	DefaultCNIConfDir = "/etc/cni/net.d"
)

// Limits on files, in bytes. The TOML decoder can take quadratic time.
const (
	maxConfSize = 1 << 20
	maxTOMLSize = 64 << 10
)
