// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"os"
	"strings"
)

// SetEnvironment sets the environment of this process. go-iptables runs programs with it, so a
// process calls SetEnvironment when it starts. Variables whose names begin with one of the prefixes
// stay. PATH becomes one of system directories, and LC_ALL becomes C. Others would change what
// iptables does (XTABLES_LIBDIR, XTABLES_LOCKFILE), or what is loaded into it.
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
