// SPDX-License-Identifier: Apache-2.0

// Package chained implements what the plugins of the benchmark share: a minimal chained CNI plugin
// that reads its entry and prevResult and passes the result on.
package chained

import (
	"encoding/json"
	"fmt"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
)

// Main runs a plugin whose ADD calls verify before it passes the result on.
func Main(name string, verify func() error) {
	add := func(args *skel.CmdArgs) error {
		var conf types.PluginConf
		if err := json.Unmarshal(args.StdinData, &conf); err != nil {
			return fmt.Errorf("read entry: %w", err)
		}
		if err := version.ParsePrevResult(&conf); err != nil {
			return fmt.Errorf("read prevResult: %w", err)
		}
		if err := verify(); err != nil {
			return err
		}
		return types.PrintResult(conf.PrevResult, conf.CNIVersion)
	}
	nothing := func(*skel.CmdArgs) error { return nil }
	skel.PluginMainFuncs(skel.CNIFuncs{Add: add, Del: nothing, Check: nothing, GC: nothing, Status: nothing}, version.All, name)
}
