// SPDX-License-Identifier: Apache-2.0

// Command ip-masq is a chained CNI plugin. The container runtime runs it on
// every pod ADD after the plugin that creates the interface. It ensures the rules by which
// the node masquerades traffic of pods to networks that cannot route pod addresses.
package main

import (
	"fmt"
	"os"
	"runtime/debug"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	cniversion "github.com/containernetworking/cni/pkg/version"
	"github.com/containernetworking/plugins/pkg/utils/buildversion"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/cniplugin"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/addresses"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/conntrack"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/iptables"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nftables"
)

// unstamped is the version of a build without one, as package buildversion has it.
const unstamped = "version unknown"

func main() {
	// The process lives for milliseconds: most ADDs end before the first collection, at 32 MiB.
	debug.SetGCPercent(800)
	nft := nftables.New()
	path := os.Getenv("PATH")
	// It replaces PATH, and removes all variables but those with these prefixes.
	iptables.SetEnvironment("CNI_", "TZ")
	p := &cniplugin.Plugin{
		Drivers:    netfilter.Drivers{iptables.New(path), nft},
		Program:    program(),
		Generation: nft.Generation,
		Conntrack:  conntrack.Reset,
		Addresses:  addresses.Read,
		PluginFile: config.DefaultPluginFile,
		LockWait:   10 * time.Second,
		Stdout:     os.Stdout,
		Stderr:     os.Stderr,
	}
	if buildversion.BuildVersion != unstamped {
		p.Version = buildversion.BuildVersion
	}
	skel.PluginMainFuncs(p.Funcs(), cniversion.All, buildversion.BuildString(config.PluginType))
}

// program identifies this build: by its version and, as two builds can have the same, by the
// executable file.
func program() string {
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/exe", &st); err != nil {
		return ""
	}
	return fmt.Sprint(buildversion.BuildVersion, " ", st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim)
}
