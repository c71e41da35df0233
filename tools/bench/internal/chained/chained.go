// SPDX-License-Identifier: Apache-2.0

// Package chained is what the plugins that ip-masq is measured against have in
// common: the least that a chained CNI plugin may be. It reads its entry and the
// result of the plugin before it, and passes that on. What it owns is that they
// differ in how they verify rules and in nothing else.
package chained

import (
	"encoding/json"
	"fmt"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
)

// Conf is what such a plugin knows of ip-masq's entry.
type Conf struct {
	types.PluginConf
	Chain string `json:"masqChain"`
	IPv6  bool   `json:"enableIPv6"`
}

// Protocols are the families of iptables that the entry names.
func (c Conf) Protocols() []string {
	if c.IPv6 {
		return []string{"iptables", "ip6tables"}
	}
	return []string{"iptables"}
}

// Main runs a plugin whose ADD verifies by a function before it passes the
// result on. A nil function verifies nothing.
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
