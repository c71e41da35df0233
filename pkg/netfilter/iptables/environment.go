// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"os"
	"strings"
)

// SetEnvironment makes the environment of this process that of the programs which go-iptables runs,
// as it runs them with the one that it finds: a PATH of system directories and the locale C,
// without variables that change what iptables does (XTABLES_LIBDIR, XTABLES_LOCKFILE) or what is
// loaded into it. A process calls it when it starts. Variables whose names begin with one of the
// prefixes stay.
func SetEnvironment(keep ...string) {
	for _, variable := range os.Environ() {
		name, _, _ := strings.Cut(variable, "=")
		if !hasPrefix(name, keep) {
			_ = os.Unsetenv(name) // fails for no name that os.Environ returns
		}
	}
	_ = os.Setenv("PATH", childPath)
	_ = os.Setenv("LC_ALL", "C")
}

func hasPrefix(name string, prefixes []string) bool {
	for _, prefix := range prefixes {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}
