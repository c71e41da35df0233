// SPDX-License-Identifier: Apache-2.0

// Package chained implements what the plugins of the benchmark share: a minimal chained CNI plugin
// that reads its entry and prevResult and passes the result on, so that the plugins differ only in
// how they verify rules.
package chained

import (
	"encoding/json"
	"fmt"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
)

// Conf has the keys of ip-masq's entry that the plugins use.
type Conf struct {
	types.PluginConf
	Chain string `json:"masqChain"`
	IPv6  bool   `json:"enableIPv6"`
}

// Protocols returns the iptables families of the entry.
func (c Conf) Protocols() []string {
	if c.IPv6 {
		return []string{"iptables", "ip6tables"}
	}
	return []string{"iptables"}
}

// Main runs a plugin whose ADD calls verify, unless nil, before it passes the result on.
func Main(name string, verify func(Conf) error) {
	add := func(args *skel.CmdArgs) error {
		var conf Conf
		if err := json.Unmarshal(args.StdinData, &conf); err != nil {
			return fmt.Errorf("read entry: %w", err)
		}
		if err := version.ParsePrevResult(&conf.PluginConf); err != nil {
			return fmt.Errorf("read prevResult: %w", err)
		}
		if verify != nil {
			if err := verify(conf); err != nil {
				return err
			}
		}
		return types.PrintResult(conf.PrevResult, conf.CNIVersion)
	}
	nothing := func(*skel.CmdArgs) error { return nil }
	skel.PluginMainFuncs(skel.CNIFuncs{Add: add, Del: nothing, Check: nothing, GC: nothing, Status: nothing}, version.All, name)
}
