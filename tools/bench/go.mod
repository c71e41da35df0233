module github.com/ip-masq/ip-masq-cni/tools/bench

go 1.26.0

replace github.com/ip-masq/ip-masq-cni => ../..

require (
	github.com/aclements/go-moremath v0.0.0-20210112150236-f10218a38794
	github.com/containernetworking/cni v1.3.1
	github.com/ip-masq/ip-masq-cni v0.0.0
	golang.org/x/sys v0.49.0
)

require (
	github.com/BurntSushi/toml v1.6.0 // indirect
	github.com/containernetworking/plugins v1.9.1 // indirect
	github.com/google/go-cmp v0.7.0 // indirect
	github.com/vishvananda/netlink v1.3.1 // indirect
	github.com/vishvananda/netns v0.0.5 // indirect
	go4.org/netipx v0.0.0-20260823151212-3075585bcbeb // indirect
	golang.org/x/net v0.59.0 // indirect
	golang.org/x/perf v0.0.0-20260908200009-22c9c6c9d4da // indirect
	golang.org/x/tools v0.49.0 // indirect
)

tool golang.org/x/perf/cmd/benchstat
