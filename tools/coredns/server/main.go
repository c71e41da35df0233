// SPDX-License-Identifier: Apache-2.0

// Command server is CoreDNS with the plugins that test clusters and the network tests of Kubernetes
// need. The usual main has more than fifty, with the libraries of several clouds.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/hosts"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/ready"
)

func main() {
	dnsserver.Directives = []string{"ready", "errors", "log", "cache", "hosts", "kubernetes"}
	coremain.Run()
}
