// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"os/exec"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
)

// startup measures the start of each program, which prints its version and ends.
func (b *bench) startup() error {
	binaries, err := topology.BinDir()
	if err != nil {
		return err
	}
	var contenders []measure.Contender
	for _, p := range []struct {
		name, path string
		args       []string
	}{
		{"empty", "/bench/plugin-empty", nil}, {"ip-masq", "/ip-masq", nil}, {"go-iptables", "/bench/plugin-go-iptables", nil},
		{"reconciler", "/ip-masq-reconciler", []string{"version"}},
	} {
		info, err := os.Stat(binaries + p.path)
		if err != nil {
			return err
		}
		contenders = append(contenders, measure.Contender{Name: "program=" + p.name, Run: func(int) ([]measure.Value, error) {
			c := exec.Command(binaries+p.path, p.args...)
			c.Env = []string{"PATH=/nowhere"}
			start := time.Now()
			if out, err := c.CombinedOutput(); err != nil {
				return nil, fmt.Errorf("%w\n%s", err, out)
			}
			return []measure.Value{wall(time.Since(start)), {Cost: float64(info.Size()), Unit: "file-bytes"}}, nil
		}})
	}
	_, err = b.compare("Start", b.limit(120, 5*time.Second), contenders...)
	return err
}
